//! The last prompt of each session, so that a verb can name a session instead of its tokens.
//!
//! Bounded by sessions and by tokens; what was noted longest ago is forgotten. A session belongs to
//! a salt: the same name under another one is another session.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use rootstock::radix::Token;

/// Salt and name.
type SessionKey = (Option<String>, String);

/// The prompts of sessions.
#[derive(Debug)]
pub struct Sessions {
    inner: Mutex<Inner>,
    sessions_max: usize,
    tokens_max: usize,
}

#[derive(Debug, Default)]
struct Inner {
    by_name: BTreeMap<SessionKey, (u64, Arc<[Token]>)>,
    by_use: BTreeMap<u64, SessionKey>,
    tokens: usize,
    uses: u64,
}

impl Sessions {
    /// None yet.
    pub fn new(sessions_max: usize, tokens_max: usize) -> Sessions {
        Sessions {
            inner: Mutex::default(),
            sessions_max,
            tokens_max,
        }
    }

    /// A session has this prompt now. One that is larger than all the room is not kept.
    pub fn note(&self, salt: Option<&str>, name: &str, tokens: &[Token]) {
        if tokens.len() > self.tokens_max {
            return;
        }
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (salt.map(str::to_owned), name.to_owned());
        inner.forget(&key);
        inner.uses += 1;
        inner.tokens += tokens.len();
        let uses = inner.uses;
        inner.by_use.insert(uses, key.clone());
        inner.by_name.insert(key, (uses, tokens.into()));
        while inner.by_name.len() > self.sessions_max || inner.tokens > self.tokens_max {
            let Some((_, oldest)) = inner.by_use.first_key_value() else {
                return;
            };
            let oldest = oldest.clone();
            inner.forget(&oldest);
        }
    }

    /// The last prompt of a session.
    pub fn prompt(&self, salt: Option<&str>, name: &str) -> Option<Arc<[Token]>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (salt.map(str::to_owned), name.to_owned());
        inner.by_name.get(&key).map(|kept| Arc::clone(&kept.1))
    }
}

impl Inner {
    fn forget(&mut self, key: &SessionKey) {
        if let Some((uses, tokens)) = self.by_name.remove(key) {
            self.by_use.remove(&uses);
            self.tokens -= tokens.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_prompt_counts_and_salts_are_apart() {
        let sessions = Sessions::new(10, 100);
        sessions.note(None, "s", &[1]);
        sessions.note(Some("a"), "s", &[2]);
        sessions.note(None, "s", &[1, 3]);
        assert_eq!(sessions.prompt(None, "s").as_deref(), Some(&[1, 3][..]));
        assert_eq!(sessions.prompt(Some("a"), "s").as_deref(), Some(&[2][..]));
        assert_eq!(sessions.prompt(Some("b"), "s"), None);
    }

    #[test]
    fn sessions_and_tokens_are_bounded_and_the_oldest_goes() {
        let sessions = Sessions::new(2, 10);
        sessions.note(None, "a", &[1]);
        sessions.note(None, "b", &[1]);
        sessions.note(None, "a", &[1]);
        sessions.note(None, "c", &[1]);
        assert_eq!(sessions.prompt(None, "b"), None);
        sessions.note(None, "d", &[1; 10]);
        assert_eq!(sessions.prompt(None, "a"), None);
        assert_eq!(sessions.prompt(None, "c"), None);
        assert!(sessions.prompt(None, "d").is_some());
        sessions.note(None, "d", &[1; 11]);
        assert!(
            sessions.prompt(None, "d").is_some(),
            "what is too large changes nothing"
        );
    }
}
