//! What keys mean in `rootstock top`.

use ratatui::crossterm::event::KeyCode;

use super::seen::Seen;
use super::view::View;

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Nothing but what the view shows.
    None,
    /// The end.
    Quit,
    /// A verb on what is chosen.
    Act(&'static str),
}

/// What a key does to the view, and what it asks for.
#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "all other keys of all terminals mean nothing"
)]
pub fn key(view: &mut View, seen: &Seen, code: KeyCode) -> Wish {
    match code {
        KeyCode::Char('q') | KeyCode::Esc => return Wish::Quit,
        KeyCode::Char('p') => return Wish::Act("kv.pin"),
        KeyCode::Char('f') => return Wish::Act("kv.prefetch"),
        KeyCode::Char('d') => return Wish::Act("kv.demote"),
        KeyCode::Char('r') => return Wish::Act("kv.release"),
        KeyCode::Char('t') => view.by_tier = !view.by_tier,
        KeyCode::Tab => view.switch(),
        KeyCode::Down | KeyCode::Char('j') => view.step(seen, 1),
        KeyCode::Up | KeyCode::Char('k') => view.step(seen, -1),
        KeyCode::PageDown => view.step(seen, 20),
        KeyCode::PageUp => view.step(seen, -20),
        KeyCode::Home => view.step(seen, isize::MIN),
        KeyCode::End => view.step(seen, isize::MAX),
        _ => {}
    }
    Wish::None
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_move_within_the_lists_and_verbs_are_about_what_is_chosen() {
        let picture = json!({"page_tokens": 16,
            "parts": [{"id": "1.1", "pages": 4, "below": 9}, {"id": "2.1", "pages": 5, "parent": 0},
                {"nodes": 3, "pages": 1, "parent": 0}],
            "programs": [{"name": "a"}, {"name": "b"}]});
        let mut seen = Seen::default();
        seen.take(0.0, serde_json::from_value(picture).unwrap(), None);
        let mut view = View::new("box:1".to_owned());
        assert_eq!(view.target(&seen), Some(json!({"node": "1.1"})));
        assert_eq!(key(&mut view, &seen, KeyCode::Down), Wish::None);
        assert_eq!(view.target(&seen), Some(json!({"node": "2.1"})));
        key(&mut view, &seen, KeyCode::End);
        assert_eq!(view.target(&seen), None, "several nodes are no target");
        key(&mut view, &seen, KeyCode::Home);
        key(&mut view, &seen, KeyCode::Up);
        assert_eq!(view.target(&seen), Some(json!({"node": "1.1"})));
        key(&mut view, &seen, KeyCode::Tab);
        key(&mut view, &seen, KeyCode::PageDown);
        assert_eq!(view.target(&seen), Some(json!({"program": "b"})));
        assert_eq!(
            key(&mut view, &seen, KeyCode::Char('p')),
            Wish::Act("kv.pin")
        );
        assert_eq!(key(&mut view, &seen, KeyCode::Char('q')), Wish::Quit);
        assert_eq!(View::new(String::new()).target(&Seen::default()), None);
    }
}
