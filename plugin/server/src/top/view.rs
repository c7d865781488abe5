//! How `rootstock top` looks: numbers, memory, tree, what went, programs.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph};
use serde_json::{Value, json};

use super::seen::{Part, Program, Seen};

const SOFT: Style = Style::new().fg(Color::DarkGray);
const BAR: usize = 18;
const HELP: &str = "q quits  Tab changes side  t kind or tier  p pin 5m  f prefetch  d demote  \
    r release";

/// Which list the keys move in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pane {
    /// The tree.
    Tree,
    /// The programs.
    Programs,
}

impl Pane {
    const fn other(self) -> Pane {
        match self {
            Pane::Tree => Pane::Programs,
            Pane::Programs => Pane::Tree,
        }
    }
}

/// What is shown of what was seen.
#[derive(Debug)]
pub struct View {
    server: String,
    /// Where the keys are.
    pub pane: Pane,
    /// Rows chosen in tree and programs.
    chosen: (usize, usize),
    /// Colors tell tiers, not kinds.
    pub by_tier: bool,
    /// What came of the last verb.
    pub said: String,
}

impl View {
    /// A view of a server.
    pub const fn new(server: String) -> View {
        View {
            server,
            pane: Pane::Tree,
            chosen: (0, 0),
            by_tier: false,
            said: String::new(),
        }
    }

    /// The keys go to the other list.
    pub fn switch(&mut self) {
        self.pane = self.pane.other();
    }

    /// Another row is chosen.
    pub fn step(&mut self, seen: &Seen, by: isize) {
        let (chosen, rows) = match self.pane {
            Pane::Tree => (&mut self.chosen.0, seen.picture.parts.len()),
            Pane::Programs => (&mut self.chosen.1, seen.picture.programs.len()),
        };
        *chosen = chosen.saturating_add_signed(by).min(rows.saturating_sub(1));
    }

    /// What verbs are about.
    pub fn target(&self, seen: &Seen) -> Option<Value> {
        match self.pane {
            Pane::Tree => {
                let rows = seen.picture.rows();
                let (_, index) = rows.get(self.chosen.0)?;
                let id = seen.picture.parts.get(*index)?.id.as_ref()?;
                Some(json!({"node": id}))
            }
            Pane::Programs => {
                let program = seen.picture.programs.get(self.chosen.1)?;
                Some(json!({"program": program.name}))
            }
        }
    }

    /// Draws everything.
    pub fn draw(&self, frame: &mut Frame<'_>, seen: &Seen) {
        let tiers = seen.stats().map_or(0, |stats| list(stats, "tiers").len());
        let pools = u16::try_from(tiers).unwrap_or(u16::MAX);
        let rows = Layout::vertical([
            Constraint::Length(2),
            Constraint::Length(pools),
            Constraint::Min(6),
            Constraint::Percentage(32),
            Constraint::Length(1),
        ]);
        let [head, memory, tree, programs, foot] = rows.areas(frame.area());
        let [tree, gone] =
            Layout::horizontal([Constraint::Min(40), Constraint::Percentage(34)]).areas(tree);
        frame.render_widget(self.head(seen), head);
        frame.render_widget(self.memory(seen), memory);
        self.tree(frame, tree, seen);
        frame.render_widget(self.gone(seen), gone);
        self.programs(frame, programs, seen);
        let foot_line = match self.said.is_empty() {
            true => Line::styled(HELP, SOFT),
            false => Line::from(self.said.as_str()),
        };
        frame.render_widget(Paragraph::new(foot_line), foot);
    }

    fn head(&self, seen: &Seen) -> Paragraph<'_> {
        let state = match &seen.trouble {
            None => Span::styled(" live", Style::new().fg(Color::Green)),
            Some(trouble) => Span::styled(format!(" {trouble}"), Style::new().fg(Color::Red)),
        };
        let tokens = seen.picture.pages * seen.picture.page_tokens;
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let first = Line::from(vec![
            Span::styled("Rootstock ", bold),
            Span::raw(self.server.as_str()),
            state,
            Span::styled(
                format!("  {} tokens in {} nodes", count(tokens), seen.picture.nodes),
                SOFT,
            ),
        ]);
        let cached =
            ["device", "host", "storage"].map(|tier| format!("/requests/cached_tokens/{tier}"));
        let cached: Vec<&str> = cached.iter().map(String::as_str).collect();
        let hit = seen.ratio(&cached, &["/requests/prompt_tokens"]);
        let classes = ["prefill", "decode", "mixed"];
        let sums = classes.map(|class| format!("/steps/by_class/{class}/sum_s"));
        let counts = classes.map(|class| format!("/steps/by_class/{class}/count"));
        let step = seen.ratio(
            &sums.each_ref().map(String::as_str),
            &counts.each_ref().map(String::as_str),
        );
        let second = match seen.stats() {
            None => "numbers about everybody are told on the server's own machine only".to_owned(),
            Some(_) => format!(
                "first token {} (95 % {})   cached {}   batch {} running, {} waiting   \
                 {:.0} tokens/s   step {}",
                time(seen.quantile("ttft", 0.5)),
                time(seen.quantile("ttft", 0.95)),
                hit.map_or("-".to_owned(), |hit| format!("{:.0} %", 100.0 * hit)),
                seen.number("/requests/running"),
                seen.number("/requests/waiting"),
                seen.rate(&["/requests/generated_tokens"]),
                time(step),
            ),
        };
        Paragraph::new(vec![first, Line::from(second)])
    }

    fn memory(&self, seen: &Seen) -> Paragraph<'_> {
        let Some(stats) = seen.stats() else {
            return Paragraph::default();
        };
        let page_tokens = stats["page_tokens"].as_u64().unwrap_or(1);
        let line = |tier: &Value| {
            let pages = |state: &str| tier["pages"][state].as_u64().unwrap_or_default();
            let total = pages("total").max(1);
            let mut spans = vec![Span::styled(
                format!("{:<8}", tier["tier"].as_str().unwrap_or_default()),
                SOFT,
            )];
            let mut at = 0;
            let states = [
                ("leased", '\u{2588}'),
                ("held", '\u{2593}'),
                ("in_transit", '\u{2593}'),
                ("evictable", '\u{2592}'),
            ];
            let mut sum = 0;
            for (state, mark) in states {
                sum += pages(state);
                let end = cells(sum, total, 30);
                spans.push(Span::styled(
                    mark.to_string().repeat(end.saturating_sub(at)),
                    Style::new().fg(tier_color(tier["tier"].as_str().unwrap_or_default())),
                ));
                at = end.max(at);
            }
            spans.push(Span::styled(
                "\u{b7}".repeat(30_usize.saturating_sub(at)),
                SOFT,
            ));
            let used = total - pages("free").min(total);
            spans.push(Span::raw(format!(
                " {} of {} tokens",
                count(used * page_tokens),
                count(total * page_tokens)
            )));
            Line::from(spans)
        };
        Paragraph::new(list(stats, "tiers").iter().map(line).collect::<Vec<_>>())
    }

    fn tree(&self, frame: &mut Frame<'_>, area: Rect, seen: &Seen) {
        let rows = seen.picture.rows();
        let most = seen.picture.parts.iter().map(|part| part.pages).max();
        let line = |(row, &(depth, index)): (usize, &(usize, usize))| {
            let Some(part) = seen.picture.parts.get(index) else {
                return Line::default();
            };
            let tokens = |pages: u64| count(pages * seen.picture.page_tokens);
            let mut words = match &part.id {
                Some(_) => name(&part.kind).to_owned(),
                None => format!("{} more", part.nodes.unwrap_or(1)),
            };
            if let Some(left) = part.pin_left_s {
                words += &format!(", pinned {left} s");
            }
            if part.used {
                words += ", in use";
            }
            let bar = cells(part.pages, most.unwrap_or(1).max(1), BAR).max(1);
            let indent = "  ".repeat(depth.min(16));
            let mark = if part.pinned > 0 {
                "\u{25c6}"
            } else {
                "\u{25a0}"
            };
            let below = match part.weight() > part.pages {
                true => format!(" of {} below", tokens(part.weight())),
                false => String::new(),
            };
            let line = Line::from(vec![
                Span::raw(indent),
                Span::styled(format!("{mark} "), self.style(part)),
                Span::raw(format!("{:>7} ", tokens(part.pages))),
                Span::styled("\u{25ac}".repeat(bar), self.style(part)),
                Span::styled(format!(" {words}{below}"), SOFT),
            ]);
            mark_row(line, self.pane == Pane::Tree && row == self.chosen.0)
        };
        let lines: Vec<Line<'_>> = rows.iter().enumerate().map(line).collect();
        let title = match self.by_tier {
            true => " Prefix tree by tier ",
            false => " Prefix tree by kind ",
        };
        scrolled(frame, area, (lines, self.chosen.0), title);
    }

    fn style(&self, part: &Part) -> Style {
        let color = match self.by_tier {
            true if part.moving > part.pages / 2 => Color::DarkGray,
            true if part.host > part.pages / 2 => tier_color("host"),
            true => tier_color("device"),
            false => kind_color(&part.kind),
        };
        Style::new().fg(color)
    }

    fn gone(&self, seen: &Seen) -> Paragraph<'_> {
        let evicted = seen.stats().map(|stats| list(stats, "evicted_lately"));
        let page_tokens = seen.picture.page_tokens;
        let line = |one: &Value| {
            let tokens = count(one["pages"].as_u64().unwrap_or_default() * page_tokens);
            let tier = one["tier"].as_str().unwrap_or_default();
            let reason = one["reason"].as_str().unwrap_or_default();
            let whom = one["by"]["session"].as_str();
            let whom = whom.map_or(String::new(), |whom| format!(" by {whom}"));
            let down = match one["moved_down"].as_u64() {
                Some(1..) => ", kept below",
                Some(0) | None => "",
            };
            Line::from(vec![
                Span::styled(
                    format!("{:>4.0} s ", one["ago_s"].as_f64().unwrap_or_default()),
                    SOFT,
                ),
                Span::raw(format!("{tokens} {tier}, {reason}{whom}{down}")),
            ])
        };
        let lines: Vec<Line<'_>> = evicted.unwrap_or_default().iter().map(line).collect();
        Paragraph::new(lines).block(
            Block::bordered()
                .title(" Evicted lately ")
                .border_style(SOFT),
        )
    }

    fn programs(&self, frame: &mut Frame<'_>, area: Rect, seen: &Seen) {
        let line = |(row, program): (usize, &Program)| {
            let state = match (program.running, program.done) {
                (1.., _) => Span::styled("\u{25cf} ", Style::new().fg(Color::Green)),
                (0, true) => Span::styled("\u{b7} ", SOFT),
                (0, false) => Span::styled("\u{25cb} ", SOFT),
            };
            let due = match program.expected_in_s {
                Some(due) if due < 0.0 => format!("{:.0} s late", -due),
                Some(due) => format!("in {due:.0} s"),
                None => String::new(),
            };
            let tokens = count(program.pages * seen.picture.page_tokens);
            let name: String = program.name.chars().take(38).collect();
            let line = Line::from(vec![
                state,
                Span::raw(format!(
                    "{name:<38} {tokens:>8} {:>5} turns  ",
                    program.turns
                )),
                Span::styled(format!("{:>6.0} s ago  {due}", program.seen_s_ago), SOFT),
            ]);
            mark_row(line, self.pane == Pane::Programs && row == self.chosen.1)
        };
        let lines: Vec<Line<'_>> = seen.picture.programs.iter().enumerate().map(line).collect();
        let title = format!(" Programs ({}) ", lines.len());
        scrolled(frame, area, (lines, self.chosen.1), &title);
    }
}

/// A list in a frame, moved so that the chosen row is seen.
fn scrolled(frame: &mut Frame<'_>, area: Rect, rows: (Vec<Line<'_>>, usize), title: &str) {
    let (lines, chosen) = rows;
    let height = usize::from(area.height.saturating_sub(2));
    let from = (chosen + 1).saturating_sub(height);
    let lines: Vec<Line<'_>> = lines.into_iter().skip(from).take(height).collect();
    let block = Block::bordered().title(title.to_owned()).border_style(SOFT);
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn mark_row(line: Line<'_>, is_chosen: bool) -> Line<'_> {
    match is_chosen {
        true => line.style(Style::new().add_modifier(Modifier::REVERSED)),
        false => line,
    }
}

fn list(stats: &Value, name: &str) -> Vec<Value> {
    stats[name].as_array().cloned().unwrap_or_default()
}

/// Cells of `width` that a part of a whole fills.
fn cells(part: u64, whole: u64, width: usize) -> usize {
    let width = u64::try_from(width).unwrap_or(u64::MAX);
    let filled = part.saturating_mul(width) / whole.max(1);
    usize::try_from(filled.min(width)).unwrap_or_default()
}

fn name(kind: &str) -> &str {
    match kind {
        "" => "not told",
        "tool_output" => "tool output",
        other => other,
    }
}

fn kind_color(kind: &str) -> Color {
    match kind {
        "system" => Color::Green,
        "tools" => Color::Yellow,
        "history" => Color::Blue,
        "tool_output" => Color::Red,
        "thinking" => Color::Magenta,
        "scratchpad" => Color::LightMagenta,
        _ => Color::Gray,
    }
}

fn tier_color(tier: &str) -> Color {
    match tier {
        "device" => Color::Green,
        "host" => Color::Yellow,
        _ => Color::Blue,
    }
}

/// A number of tokens in few letters.
fn count(tokens: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a number for people")]
    let many = tokens as f64;
    match tokens {
        0..10_000 => tokens.to_string(),
        10_000..1_000_000 => format!("{:.1} k", many / 1e3),
        _ => format!("{:.2} M", many / 1e6),
    }
}

fn time(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".to_owned(),
        Some(seconds) if seconds < 1.0 => format!("{:.0} ms", seconds * 1000.0),
        Some(seconds) => format!("{seconds:.1} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn seen() -> Seen {
        let picture = json!({"page_tokens": 16, "nodes": 9, "pages": 700,
            "parts": [
                {"id": "1.1", "pages": 256, "below": 700, "kind": "system", "pinned": 256,
                    "pin_left_s": 241, "used": true},
                {"id": "2.1", "pages": 400, "kind": "tool_output", "parent": 0, "host": 400},
                {"nodes": 7, "pages": 44, "parent": 0}],
            "programs": [
                {"name": "review", "pages": 656, "turns": 4, "running": 1, "seen_s_ago": 0.5},
                {"name": "plan", "pages": 256, "turns": 2, "seen_s_ago": 30.0,
                    "expected_in_s": -4.0}]});
        let stats = |generated: u64| {
            json!({"page_tokens": 16,
                "tiers": [{"tier": "device", "pages": {"total": 1000, "free": 100, "leased": 300,
                    "held": 0, "in_transit": 0, "evictable": 600}}],
                "requests": {"running": 3, "waiting": 2, "prompt_tokens": 1000,
                    "cached_tokens": {"device": 800, "host": 40, "storage": 0},
                    "generated_tokens": generated},
                "steps": {"by_class": {"decode": {"count": 100, "sum_s": 3.0}}},
                "times": {"bounds_s": [0.1, 0.2], "ttft": {"counts": [0, 10, 0]}},
                "evicted_lately": [{"ago_s": 2.0, "tier": "device", "reason": "room", "pages": 5,
                    "moved_down": 5, "by": {"session": "review"}}]})
        };
        let picture: super::super::seen::Picture = serde_json::from_value(picture).unwrap();
        let mut seen = Seen::default();
        seen.take(0.0, picture.clone(), Some(stats(100)));
        seen.take(2.0, picture, Some(stats(180)));
        seen
    }

    fn drawn(view: &View, seen: &Seen, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame, seen)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let row = |y| {
            (0..width)
                .map(|x| buffer[(x, y)].symbol())
                .collect::<String>()
        };
        (0..height).map(|y| row(y).trim_end().to_owned()).collect()
    }

    #[test]
    fn numbers_memory_tree_evictions_and_programs_are_all_there() {
        let view = View::new("127.0.0.1:8000".to_owned());
        let rows = drawn(&view, &seen(), 140, 30);
        let text = rows.join("\n");
        for part in [
            "Rootstock 127.0.0.1:8000 live  11.2 k tokens in 9 nodes",
            "first token 150 ms",
            "cached 84 %",
            "batch 3 running, 2 waiting",
            "40 tokens/s",
            "step 30 ms",
            "14.4 k of 16.0 k tokens",
            "\u{25c6}    4096",
            "system, pinned 241 s, in use of 11.2 k below",
            "tool output",
            "7 more",
            "80 device, room by review, kept below",
            "\u{25cf} review",
            "4 s late",
            "q quits",
        ] {
            assert!(text.contains(part), "{part:?} is missing:\n{text}");
        }
        let system = rows.iter().position(|row| row.contains("system")).unwrap();
        let below = rows
            .iter()
            .position(|row| row.contains("tool output"))
            .unwrap();
        assert_eq!(below, system + 1, "children stand below their parents");
    }

    #[test]
    fn a_small_terminal_a_refused_server_and_an_empty_cache_are_drawn_too() {
        let mut view = View::new("box:1".to_owned());
        for (width, height) in [(1, 1), (20, 5), (60, 12)] {
            drawn(&view, &seen(), width, height);
        }
        let mut refused = Seen::default();
        refused.take(0.0, Default::default(), None);
        let text = drawn(&view, &refused, 120, 24).join("\n");
        assert!(text.contains("on the server's own machine only"), "{text}");
        refused.trouble = Some("no server answers at box:1".to_owned());
        view.said = "kv.pin: accepted, 4 pages".to_owned();
        let text = drawn(&view, &refused, 120, 24).join("\n");
        assert!(
            text.contains("no server answers") && text.contains("accepted"),
            "{text}"
        );
    }
}
