//! Speculative work: prompts computed ahead for turns that may come, below everything a client
//! asked for.
//!
//! It gets what is left of a step, and of that so little that a client who comes while the step
//! runs does not wait longer than for a short one. It never gives way and comes back: as soon as a
//! client waits for a seat or for pages, or needs what it holds, it ends as `Displaced`; what it
//! has computed by then stays cached, and nothing else is left of it. It is charged to nobody.

use crate::config::SchedulerConfig;
use crate::emit::FinishReason;
use crate::request::{Class, RequestId};
use crate::scheduler::{Cx, Scheduler};

/// Share of a step that speculative work gets while no client runs, and while some do.
const ALONE_SHARE: u32 = 4;
const BESIDE_SHARE: u32 = 8;

impl Scheduler {
    /// Tokens of a step that speculative work may take; a page at least.
    pub(crate) fn idle_budget(&self) -> u32 {
        let SchedulerConfig {
            step_tokens,
            page_tokens,
            ..
        } = self.cfg;
        let share = match self.seated().any(|live| live.class == Class::Client) {
            true => BESIDE_SHARE,
            false => ALONE_SHARE,
        };
        (step_tokens / share).max(page_tokens)
    }

    /// Ends all speculative work when a client could not start at the last try.
    pub(crate) fn shed_idle_work(&mut self, cx: &mut Cx<'_>) {
        if self.speculative.is_empty() {
            return;
        }
        let waits = |id: RequestId| {
            let live = self.live.get(&id);
            live.is_some_and(|live| live.class == Class::Client)
        };
        if !self.turned_away.into_iter().chain(self.claim).any(waits) {
            return;
        }
        while let Some(&id) = self.speculative.first() {
            self.end(cx, id, FinishReason::Displaced);
        }
    }
}
