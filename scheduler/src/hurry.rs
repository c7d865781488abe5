//! Short steps for those whom somebody waits for.
//!
//! A client's request with a jump in its hints hurries until its first token. While one can
//! compute, the step is made for it: its prompt first, and what others may add only as long as the
//! step takes little longer by the learned times. Decoding requests without a jump sit such steps
//! out, but never many in a row; prompts without a jump wait, and age in the queue as they always
//! do. Nothing is lost by it: what was put off is computed in the steps between.
//!
//! Where the backend can pause a step, those who hurry do not even wait for the one in flight:
//! they get a step that overtakes it, without the requests that have a part in it.
//!
//! Part of the step target (`target_step_ms`); without one, or before the times of steps are
//! known, nobody hurries.

use crate::config::SchedulerConfig;
use crate::draft::Draft;
use crate::live::Live;
use crate::policy::Order;
use crate::request::{Class, RequestId};
use crate::scheduler::{Cx, Scheduler};
use crate::step::StepPlan;
use crate::time::StepLoad;
use crate::walk::Turn;

/// Steps that a decoding request sits out in a row, at most.
const SAT_OUT_MAX: u64 = 3;
/// A step for those who hurry may take this much longer for the sake of others: a quarter.
const LONGER: (u64, u64) = (5, 4);

impl Live {
    /// Somebody waits for its first token and says so.
    pub(crate) fn hurries(&self) -> bool {
        self.is_watched() && self.waiting_since.is_some()
    }

    /// Somebody waits for its answers, or so its hints say.
    pub(crate) fn is_watched(&self) -> bool {
        self.class == Class::Client && self.hints.jump_s > 0.0
    }
}

impl Scheduler {
    /// Drafts a step for those who hurry. False, and an empty draft: none of them can compute
    /// now, so the step is like any other.
    pub(crate) fn plan_hurried(&mut self, cx: &mut Cx<'_>, draft: &mut Draft) -> bool {
        if self.cfg.target_step_ms == 0 || self.time.token_ns().is_none() || self.claim.is_some() {
            return false;
        }
        let order = self.decode_order(draft.budget as usize);
        let (kept, put_off): (Vec<_>, Vec<_>) =
            order.into_iter().partition(|&id| self.must_decode(id));
        let kept_load = self.load_of_decodes(&kept);
        let budget = self.step_budget(kept_load).max(kept_load.tokens);
        draft.budget = budget - kept_load.tokens;
        self.plan_hurried_prompts(cx, draft, false);
        if draft.rows.is_empty() {
            return false;
        }
        draft.budget += kept_load.tokens;
        self.plan_decodes(cx, draft, kept);
        let alone = draft.load();
        let others = self.load_of_decodes(&put_off);
        let with = alone + others;
        if let (Some(alone), Some(with)) = (self.time.predict(alone), self.time.predict(with)) {
            let (more, of) = LONGER;
            if with.saturating_mul(of) <= alone.saturating_mul(more) {
                let room = self.cfg.step_tokens.saturating_sub(draft.load().tokens);
                draft.budget = draft.budget.max(room);
                self.plan_decodes(cx, draft, put_off);
            }
        }
        self.stats.hurried_steps += 1;
        true
    }

    /// Whether a decoding request takes part although others hurry.
    fn must_decode(&self, id: RequestId) -> bool {
        let live = &self.live[&id];
        let last = live.running().and_then(|run| run.last_row);
        let waits = last.is_none_or(|(step, _)| step.0 + SAT_OUT_MAX < self.next_step);
        waits || live.is_watched()
    }

    fn load_of_decodes(&self, ids: &[RequestId]) -> StepLoad {
        // Making room for one may have ended another.
        load_of(ids.iter().filter_map(|id| self.live.get(id)))
    }

    /// Whether it is worth a look for a step that overtakes the one in flight.
    pub(crate) fn may_overtake(&self) -> bool {
        let SchedulerConfig {
            overtake,
            max_in_flight,
            target_step_ms,
            ..
        } = self.cfg;
        if !overtake || max_in_flight != 1 || target_step_ms == 0 || self.flights.len() != 1 {
            return false;
        }
        let first = match Order::is_fair(&self.cfg) {
            true => self.queue.heads().next(),
            false => self.queue.next_after(None),
        };
        first.is_some_and(|key| self.live[&key.id].hurries()) || self.seated().any(Live::hurries)
    }

    /// A step for those who hurry and have no part in the one in flight.
    pub(crate) fn plan_overtaking(&mut self, cx: &mut Cx<'_>) -> Option<StepPlan> {
        let mut draft = Draft {
            overtakes: true,
            ..Draft::new(self.step_budget(StepLoad::default()), 0)
        };
        self.settle_fetches(cx, &mut draft);
        if self.claim.is_none() {
            self.plan_hurried_prompts(cx, &mut draft, true);
        }
        if draft.rows.is_empty() && draft.copies.is_empty() {
            return None;
        }
        if let Some(overtaken) = self.flights.front_mut() {
            overtaken.overtaken = true;
        }
        let computes = u64::from(!draft.rows.is_empty());
        self.stats.hurried_steps += computes;
        self.stats.overtaking_steps += computes;
        Some(self.commit(cx, draft))
    }

    /// Drafts prompts in the order of all, up to the first that does not hurry; with `apart` none
    /// that has a part in a step in flight.
    fn plan_hurried_prompts(&mut self, cx: &mut Cx<'_>, draft: &mut Draft, apart: bool) {
        let mut walk = self.walk(cx.now);
        while draft.budget > 0 {
            let Some(turn) = walk.next(&self.queue) else {
                return;
            };
            let (Turn::Prefill(id) | Turn::Waiting(id)) = turn;
            let live = &self.live[&id];
            if !live.hurries() {
                return;
            }
            if apart && live.is_in_flight() {
                continue;
            }
            match turn {
                Turn::Prefill(_) => self.plan_chunk(cx, draft, id),
                Turn::Waiting(_) => {
                    if self.is_under_way(cx, draft, id) || self.start(cx, draft, id).is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Whether what it would compute is on its way without it.
    pub(crate) fn is_under_way(&self, cx: &Cx<'_>, draft: &Draft, id: RequestId) -> bool {
        self.computed_by_another(draft, id) || self.fetched_by_another(id) || self.is_read(cx, id)
    }

    /// Decoding requests, and what they compute and read in a step.
    pub(crate) fn decode_load(&self) -> StepLoad {
        load_of(self.decoding())
    }
}

/// What a token of each of these computes and reads.
fn load_of<'a>(decoding: impl Iterator<Item = &'a Live>) -> StepLoad {
    let running = decoding.filter_map(Live::running);
    StepLoad::of(running.map(|run| (run.launched, 1, true)))
}
