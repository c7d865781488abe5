//! `rootstock top`: what the page at `/` shows, in a terminal.
//!
//! [`seen`] keeps what the server told, [`view`] draws it, [`keys`] says what keys mean; this loop
//! asks, reads keys and sends verbs. Only the loop knows a terminal.

pub mod keys;
pub mod seen;
pub mod view;

use std::io;
use std::time::Duration;

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use serde_json::{Value, json};

use crate::remote::{Address, Remote, RemoteError};
use keys::{Wish, key};
use seen::{Picture, Seen};
use view::View;

/// Parts of the tree that are asked for.
const PARTS: usize = 200;
/// Longest wait for a key before the next look at the clock.
const KEY_WAIT: Duration = Duration::from_millis(100);

/// Flags of `top`.
#[derive(Clone, Debug, Args)]
pub struct TopFlags {
    /// Which server, and who asks.
    #[command(flatten)]
    pub address: Address,
    /// Seconds between two looks
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS")]
    pub every: f64,
}

/// Why it ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopError {
    /// The address, or the first answer.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The terminal.
    #[error("the terminal cannot be read or written: {0}")]
    Terminal(#[from] io::Error),
    /// A flag.
    #[error("--every is {0}; 0.1 to 3600 seconds are possible")]
    Every(f64),
}

/// Looks and shows until somebody has seen enough.
///
/// # Errors
/// The address, the first answer, or the terminal.
pub fn run(flags: &TopFlags) -> Result<(), TopError> {
    if !(0.1..=3600.0).contains(&flags.every) {
        return Err(TopError::Every(flags.every));
    }
    let remote = Remote::new(&flags.address)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut seen = Seen::default();
    let begin = crate::clock::now();
    // A server that is not there is told in one line, not in a picture.
    runtime.block_on(look(&remote, &mut seen, 0.0))?;
    let mut view = View::new(remote.name());
    let mut terminal = ratatui::try_init()?;
    let ended = watch(
        flags,
        &runtime,
        &remote,
        (&mut seen, &mut view),
        &mut terminal,
        begin,
    );
    ratatui::try_restore()?;
    ended
}

fn watch(
    flags: &TopFlags,
    runtime: &tokio::runtime::Runtime,
    remote: &Remote,
    (seen, view): (&mut Seen, &mut View),
    terminal: &mut ratatui::DefaultTerminal,
    begin: std::time::Instant,
) -> Result<(), TopError> {
    let now_s = || crate::clock::now().duration_since(begin).as_secs_f64();
    let mut due_s = now_s() + flags.every;
    loop {
        terminal.draw(|frame| view.draw(frame, seen))?;
        if event::poll(KEY_WAIT)?
            && let Event::Key(pressed) = event::read()?
            && pressed.kind == KeyEventKind::Press
        {
            let interrupt = pressed.modifiers.contains(KeyModifiers::CONTROL)
                && pressed.code == KeyCode::Char('c');
            match key(view, seen, pressed.code) {
                _ if interrupt => return Ok(()),
                Wish::Quit => return Ok(()),
                Wish::Act(verb) => {
                    view.said = match view.target(seen) {
                        Some(target) => runtime.block_on(act(remote, verb, target)),
                        None => "nothing is chosen that a verb could be about".to_owned(),
                    };
                    due_s = 0.0;
                }
                Wish::None => {}
            }
        }
        if now_s() >= due_s {
            if let Err(error) = runtime.block_on(look(remote, seen, now_s())) {
                seen.trouble = Some(error.to_string());
            }
            due_s = now_s() + flags.every;
        }
    }
}

/// Asks for the picture and the numbers.
///
/// # Errors
/// There is no picture.
pub async fn look(remote: &Remote, seen: &mut Seen, at_s: f64) -> Result<(), RemoteError> {
    let picture = remote.get(&format!("/v1/kv/picture?nodes={PARTS}")).await?;
    let picture: Picture = serde_json::from_value(picture)?;
    // With keys, numbers about everybody are told on the server's machine only.
    let stats = match remote.get("/v1/kv/stats").await {
        Ok(stats) => Some(stats),
        Err(RemoteError::Refused { status: 403, .. }) => None,
        Err(error) => return Err(error),
    };
    seen.take(at_s, picture, stats);
    Ok(())
}

/// Sends a verb; what came of it, in one line.
pub async fn act(remote: &Remote, verb: &'static str, target: Value) -> String {
    let mut payload = target;
    if verb == "kv.pin" {
        payload["ttl"] = "5m".into();
    }
    let action = json!({"action_id": "1", "action_type": verb, "action_version": "1.0",
        "payload": payload});
    let body = json!({"protocol_version": "0.1", "message_id": "top", "actions": [action]});
    match remote.post("/v1/kv/actions", &body).await {
        Ok(answer) => {
            let outcome = &answer["outcomes"][0];
            let status = outcome["status"].as_str().unwrap_or("no outcome");
            let pages = outcome["pages"].as_u64().unwrap_or_default();
            let reason = outcome["reason"].as_str().unwrap_or_default();
            format!("{verb}: {status}, {pages} pages {reason}")
        }
        Err(error) => error.to_string(),
    }
}
