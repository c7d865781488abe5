//! What an engine must offer to run plans: the trait `Backend`, its `Caps` and its `StepError`.
//!
//! A plan is data. Whoever runs it (our CPU backend, a host engine behind the C ABI, the double of
//! the tests) gets it by value, computes, and answers with one `RowOut` per row. A backend knows
//! pages and tokens, never the tree, the queue or a client. Several steps may be in flight; they
//! finish in the order they were launched, but for those that overtake.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rootstock_memory::{CopyEngine, KvLayout, StepId};
use rootstock_radix::Token;
use rootstock_scheduler::{RequestId, StepOutput, StepPlan};
use serde::{Deserialize, Serialize};

/// What a backend is able to do, read once before the core is built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caps {
    /// How the backend lays out KV; its `page_tokens` must equal the cache's page size.
    pub layout: KvLayout,
    /// Names everything that changes the bits of KV (instruction set, weight repack, KV dtype):
    /// part of the namespace, so that pages of other numerics are never served.
    pub numerics_id: String,
    /// Steps that may be launched and not yet waited for, at least 1.
    pub max_in_flight: u8,
    /// Number of token ids the model knows; every sampled token is below it.
    pub vocab: u32,
}

/// Why a step did not give an output. The requests of that step end as failed, the others go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The computation reported a failure.
    #[error("step {} failed: {message}", step.0)]
    Failed {
        /// The step that failed.
        step: StepId,
        /// What the backend said, one line.
        message: Box<str>,
    },
    /// The computation panicked and was caught.
    #[error("step {} panicked: {message}", step.0)]
    Panicked {
        /// The step that panicked.
        step: StepId,
        /// The panic's message, one line.
        message: Box<str>,
    },
    /// `launch` was called with `max_in_flight` steps already running.
    #[error("step {} refused: {in_flight} steps in flight, at most {max_in_flight}", step.0)]
    Full {
        /// The step that was refused; it never ran.
        step: StepId,
        /// Steps launched and not yet waited for.
        in_flight: u8,
        /// The limit of `Caps`.
        max_in_flight: u8,
    },
    /// `wait` was called for a step that is not in flight, or out of launch order.
    #[error("step {} is not the next one in flight", step.0)]
    NotInFlight {
        /// The step asked for.
        step: StepId,
    },
    /// The device or its thread is gone; no later step can run.
    #[error("backend lost at step {}: {message}", step.0)]
    Lost {
        /// The step at which the loss was noticed.
        step: StepId,
        /// What happened, one line.
        message: Box<str>,
    },
}

impl StepError {
    /// The step this error is about.
    pub fn step(&self) -> StepId {
        match self {
            Self::Failed { step, .. }
            | Self::Panicked { step, .. }
            | Self::Full { step, .. }
            | Self::NotInFlight { step }
            | Self::Lost { step, .. } => *step,
        }
    }

    /// True when the backend cannot run any later step: stop taking requests.
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }
}

/// Which tokens the grammars of requests allow. A backend asks before it draws for a request, and
/// tells what it drew, in the order of the outputs. Plans do not depend on it.
pub trait Masks: Debug + Send + Sync {
    /// One bit a token in words of 32, lowest first, for this output of a request; `None` when
    /// everything is allowed. At least one bit is set. May wait for a grammar that is late.
    fn allowed(&self, request: RequestId, output_index: u32) -> Option<Arc<[u32]>>;

    /// False where [`Masks::allowed`] allows everything for all outputs of a request, so that a
    /// backend may draw without asking.
    fn applies(&self, request: RequestId) -> bool {
        let _any = request;
        true
    }

    /// This token was drawn.
    fn drawn(&self, request: RequestId, output_index: u32, token: Token);
}

/// Runs plans. One backend belongs to one replica and to one thread.
///
/// The caller launches plans in the order the core made them, waits for each in that order, and
/// hands every output or failure back to the core (`complete` or `fail_step`) exactly once.
pub trait Backend: Send {
    /// The same answer at every call.
    fn caps(&self) -> Caps;

    /// Whether it orders each layer of a step behind that layer of the copies named in the plan's
    /// `after`, which have been submitted and may be under way when [`Backend::launch`] is called,
    /// and fails the step when one of them fails. The core lets requests begin on pages that are
    /// still being filled only then.
    fn orders_layers(&self) -> bool {
        false
    }

    /// Starts a step. Unless the backend orders layers, the plan's copies named in `after` are
    /// complete when it is called.
    ///
    /// A synchronous backend may compute here and keep the output for `wait`.
    ///
    /// # Errors
    /// The step did not start: the caller fails it in the core and does not wait for it.
    fn launch(&mut self, plan: StepPlan) -> Result<(), StepError>;

    /// Whether [`Backend::wait`] for this step, the oldest in flight, would return at once or
    /// computes it there. While it is false, further steps may be launched.
    fn is_done(&mut self, step: StepId) -> bool {
        let _computed_there = step;
        true
    }

    /// Blocks until the step is done and returns one `RowOut` per row, in row order; the row of a
    /// prefill chunk without sampling has no accepted tokens.
    ///
    /// # Errors
    /// The step gave no output; after any error but a fatal one the backend runs later steps.
    fn wait(&mut self, step: StepId) -> Result<StepOutput, StepError>;

    /// Whether [`Backend::advance`] really pauses. The core plans steps that overtake only then.
    fn can_pause(&self) -> bool {
        false
    }

    /// As [`Backend::wait`], but once `pause` is set it may return `None` with the step where it
    /// stands, to go on at the next call. In between a plan with `overtakes` is launched, which
    /// does not count as in flight, and waited for.
    ///
    /// # Errors
    /// As [`Backend::wait`].
    fn advance(
        &mut self,
        step: StepId,
        pause: &AtomicBool,
    ) -> Result<Option<StepOutput>, StepError> {
        let _never = pause;
        self.wait(step).map(Some)
    }

    /// Whether it verifies guesses that are in a plan. The core makes them only then.
    fn verifies(&self) -> bool {
        false
    }

    /// Whether it adds the token that a row continues from to the history of the row's draw. The
    /// core plans rows with penalties ahead of results only then.
    fn completes_histories(&self) -> bool {
        false
    }

    /// The engine that carries out copy plans over this backend's arenas.
    fn copies(&mut self) -> &mut dyn CopyEngine;

    /// Gives the backend the masks of requests with grammars, before the first plan. False when it
    /// cannot apply them; such requests are refused then.
    fn use_masks(&mut self, masks: Arc<dyn Masks>) -> bool {
        drop(masks);
        false
    }
}
