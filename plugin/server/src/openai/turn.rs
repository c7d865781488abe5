//! What a finished request leaves behind: its emitted tokens, so that the next turn, in which the
//! client sends the text back, continues on the very same tokens.

use std::sync::Arc;

use rootstock::radix::Token;

use crate::engine_port::{AnswerPlace, Engine};

/// Where each answer of a request is to be remembered.
#[derive(Clone, Debug)]
pub struct Turn {
    engine: Arc<Engine>,
    /// By choice; none where the prompt came as tokens.
    places: Vec<Option<AnswerPlace>>,
}

impl Turn {
    /// A turn whose answers stand behind these places.
    pub fn new(engine: &Arc<Engine>, places: Vec<Option<AnswerPlace>>) -> Turn {
        Turn {
            engine: Arc::clone(engine),
            places,
        }
    }

    /// Keeps the tokens of one finished answer.
    pub fn remember(&self, choice: usize, ids: &[Token]) {
        if let Some(place) = self.places.get(choice).copied().flatten() {
            self.engine.remember(place, ids);
        }
    }
}
