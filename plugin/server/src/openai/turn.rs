//! What a finished request leaves behind: its emitted tokens, so that the next turn, in which the
//! client sends the text back, continues on the very same tokens.

use std::sync::Arc;

use rootstock::radix::Token;

use crate::chat::ahead::{Ahead, NextTurn};
use crate::engine_port::{AnswerPlace, Engine};

/// Where each answer of a request is to be remembered.
#[derive(Clone, Debug)]
pub struct Turn {
    engine: Arc<Engine>,
    /// By choice; none where the prompt came as tokens.
    places: Vec<Option<AnswerPlace>>,
    /// What the next turn's prompt is computed ahead from.
    next: Option<Arc<NextTurn>>,
}

impl Turn {
    /// A turn whose answers stand behind these places.
    pub fn new(
        engine: &Arc<Engine>,
        places: Vec<Option<AnswerPlace>>,
        next: Option<NextTurn>,
    ) -> Turn {
        Turn {
            engine: Arc::clone(engine),
            places,
            next: next.map(Arc::new),
        }
    }

    /// Keeps the tokens of one finished answer, and has what the next turn will begin with computed
    /// ahead where that was asked for.
    pub fn remember(&self, choice: usize, ids: &[Token]) {
        if let Some(place) = self.places.get(choice).copied().flatten() {
            self.engine.remember(place, ids);
        }
        if let Some(next) = &self.next {
            Ahead::begin(&self.engine, next, ids);
        }
    }
}
