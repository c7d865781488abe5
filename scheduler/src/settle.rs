//! Taking in the results of a step: tokens, computed pages, ends.
//!
//! Results count in the order of the steps, whatever order they arrive in. A row's result means
//! that its positions, and those of accepted drafts, have their KV; complete pages go to the
//! cache at once, so that others can match them in the very next step. Tokens after the one that
//! ends a request are dropped, and so are the rows that a request still has in later steps.

use rootstock_memory::{Nanos, StepId};
use rootstock_radix::{Fate, PrefixCache, Token};

use crate::emit::{Emit, FailKind, FinishReason};
use crate::holding::{Holding, PublishArgs};
use crate::live::{Live, Phase, count};
use crate::request::RequestId;
use crate::scheduler::{Cx, Scheduler};
use crate::step::{Logprobs, RowOut, StepOutput, StepPlan};
use crate::time::StepLoad;

/// A step that is out.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) step: StepId,
    pub(crate) rows: Vec<FlightRow>,
    launched_at: Nanos,
    load: StepLoad,
    result: Option<Result<StepOutput, FailKind>>,
    /// Lands as soon as its result is told, whatever is in flight before it.
    pub(crate) overtakes: bool,
    /// Another ran in the middle of it, so that its time says nothing.
    pub(crate) overtaken: bool,
    /// It waits for copies, so that its time says nothing either.
    pub(crate) waits: bool,
}

/// One row of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlightRow {
    pub(crate) id: RequestId,
    /// Position after the last one computed, without drafts.
    pub(crate) end: u32,
    pub(crate) drafts: u8,
    pub(crate) draws: bool,
}

impl Flight {
    /// Of a plan that is out from now on.
    pub(crate) fn new(plan: &StepPlan, rows: Vec<FlightRow>, launched_at: Nanos) -> Self {
        Self {
            step: plan.id,
            rows,
            launched_at,
            load: plan.load(),
            result: None,
            overtakes: plan.overtakes,
            overtaken: false,
            waits: !plan.after.is_empty(),
        }
    }
}

impl Scheduler {
    /// The results of a step. An unknown step is ignored and counted; an output that does not
    /// fit the plan fails the requests it does not fit.
    pub fn complete(
        &mut self,
        cache: &mut PrefixCache,
        step: StepId,
        output: &StepOutput,
        now: Nanos,
        out: &mut Vec<Emit>,
    ) {
        self.settle(&mut Cx { cache, now, out }, step, Ok(output.clone()));
    }

    /// A step failed: its requests end, what it computed does not count, pages go back.
    pub fn fail_step(
        &mut self,
        cache: &mut PrefixCache,
        step: StepId,
        now: Nanos,
        out: &mut Vec<Emit>,
    ) {
        self.settle(&mut Cx { cache, now, out }, step, Err(FailKind::Step));
    }

    fn settle(&mut self, cx: &mut Cx<'_>, step: StepId, result: Result<StepOutput, FailKind>) {
        cx.out.append(&mut self.outbox);
        match self.flights.iter_mut().find(|flight| flight.step == step) {
            Some(flight) if flight.result.is_none() => flight.result = Some(result),
            Some(_) | None => self.stats.stray_results += 1,
        }
        let lands = |(at, flight): (usize, &Flight)| {
            flight.result.is_some() && (at == 0 || flight.overtakes)
        };
        while let Some(at) = self.flights.iter().enumerate().position(lands) {
            let Some(flight) = self.flights.remove(at) else {
                break;
            };
            self.land(cx, flight);
        }
    }

    fn land(&mut self, cx: &mut Cx<'_>, flight: Flight) {
        let result = flight.result.unwrap_or(Err(FailKind::Step));
        let mut results = match result {
            Ok(output) if output.rows.len() == flight.rows.len() => Ok(output.rows.into_iter()),
            Ok(_) => Err(FailKind::BadOutput),
            Err(kind) => Err(kind),
        };
        for row in &flight.rows {
            let landed = match &mut results {
                Ok(rows) => rows.next().ok_or(FailKind::BadOutput),
                Err(kind) => Err(*kind),
            };
            self.land_row(cx, flight.step, row, landed);
        }
        // A step begins when it is launched, or when the one before it ends.
        let begin = flight.launched_at.max(self.landed_at);
        self.landed_at = self.landed_at.max(cx.now);
        let telling = !flight.overtaken && !flight.waits;
        if results.is_ok() && !flight.rows.is_empty() && telling {
            self.time.learn(flight.load, cx.now.saturating_sub(begin));
            if let Some(ns) = self.time.token_ns() {
                self.order.prefill_ns_per_token = ns;
            }
        }
        // Of all steps before the first in flight, an overtaken one.
        let done = match self.flights.front() {
            Some(first) => StepId(first.step.0 - 1),
            None => StepId(self.next_step - 1),
        };
        cx.cache.step_done(self.cfg.replica, done);
    }

    fn land_row(
        &mut self,
        cx: &mut Cx<'_>,
        step: StepId,
        row: &FlightRow,
        result: Result<RowOut, FailKind>,
    ) {
        let live = self
            .live
            .get_mut(&row.id)
            .expect("a request lives as long as its steps");
        match &mut live.phase {
            Phase::Draining(rest) => {
                rest.flight.retain(|&mut other| other != step);
                if rest.flight.is_empty() {
                    self.drain(cx, row.id);
                }
                return;
            }
            Phase::Running(run) => run.flight.retain(|&mut other| other != step),
            Phase::Queued | Phase::Preempted | Phase::Fetching(_) => return,
        }
        let mut published = 0..0;
        // Nobody believes what was computed on pages that a copy never filled.
        let right = live.settle_in_transit(cx, &mut self.stats);
        self.stats.fetches_failed += u64::from(!right);
        let result = result.and_then(|row| if right { Ok(row) } else { Err(FailKind::Step) });
        let verdict = result.and_then(|result| live.take_in(row, result));
        let reason = match verdict {
            Err(kind) => Some(FinishReason::Failed(kind)),
            Ok(taken) => {
                if let Some(lookup) = live.lookup.as_mut().filter(|_| row.drafts > 0) {
                    let right = count(taken.tokens.len()) - 1;
                    lookup.learn(&mut self.guessed, u32::from(row.drafts), right);
                    self.stats.right_guesses += u64::from(right);
                }
                let before = live.holding().map_or(0, Holding::leased_pages);
                live.publish(cx);
                let after = live.holding().map_or(0, Holding::leased_pages);
                live.apply_pins(cx, self.cfg.page_tokens, &mut self.stats);
                published = before..after;
                taken.report(live, cx)
            }
        };
        let gives_way = live.is_yielding() && !live.is_in_flight();
        self.mark_waiting(row.id, published);
        if let Some(reason) = reason {
            self.end(cx, row.id, reason);
        } else if gives_way {
            self.preempt(cx, row.id);
        }
    }

    /// The last step of an ended request is over.
    fn drain(&mut self, cx: &mut Cx<'_>, id: RequestId) {
        self.draining.remove(&id);
        let Some(live) = self.live.remove(&id) else {
            return;
        };
        if let Phase::Draining(rest) = live.phase {
            rest.hold.close(cx.cache, Fate::Keep, cx.now);
        }
    }
}

/// What a row brought.
#[derive(Debug)]
struct Taken {
    tokens: Vec<Token>,
    logprobs: Option<Box<Logprobs>>,
    reason: Option<FinishReason>,
}

impl Live {
    /// Appends a row's tokens up to the one that ends the request, and moves the computed mark.
    fn take_in(&mut self, row: &FlightRow, result: RowOut) -> Result<Taken, FailKind> {
        let accepted = result.accepted;
        let most = if row.draws {
            usize::from(row.drafts) + 1
        } else {
            0
        };
        if accepted.len() > most || (row.draws && accepted.is_empty()) {
            return Err(FailKind::BadOutput);
        }
        let mut tokens = Vec::with_capacity(accepted.len());
        let mut reason = None;
        for token in accepted {
            self.tokens.push(token);
            tokens.push(token);
            reason = self.reason_after(token);
            if reason.is_some() {
                break;
            }
        }
        let run = self.running_mut().ok_or(FailKind::BadOutput)?;
        let verified = u32::try_from(tokens.len().saturating_sub(1)).unwrap_or(0);
        let end = row.end + verified;
        run.computed = run.computed.max(end);
        if row.draws {
            run.pending -= 1;
        }
        if row.drafts > 0 {
            run.launched = end;
            run.drafting = false;
        }
        let mut logprobs = result.logprobs;
        if let Some(list) = &mut logprobs {
            list.tokens.truncate(tokens.len());
        }
        Ok(Taken {
            tokens,
            logprobs,
            reason,
        })
    }

    fn reason_after(&self, token: Token) -> Option<FinishReason> {
        let made = self.output_len();
        let stops = !self.ignore_eos && made >= self.output_min;
        if stops && self.stop_tokens.contains(&token) {
            return Some(FinishReason::Stop);
        }
        (made >= self.output_max).then_some(FinishReason::Length)
    }

    /// Gives complete pages to the cache.
    fn publish(&mut self, cx: &mut Cx<'_>) {
        let Live {
            tokens,
            hints,
            phase,
            prompt_tokens,
            ..
        } = self;
        let Phase::Running(run) = phase else { return };
        let busy_until = run.flight.last().copied();
        let args = PublishArgs {
            hints,
            prompt_tokens: *prompt_tokens,
            busy_until,
            now: cx.now,
        };
        run.hold.publish(cx.cache, tokens, run.computed, &args);
    }
}

impl Taken {
    fn report(self, live: &mut Live, cx: &mut Cx<'_>) -> Option<FinishReason> {
        if !self.tokens.is_empty() {
            live.served(cx.now);
            cx.out.push(Emit::Tokens {
                request: live.id,
                label: live.label,
                tokens: self.tokens,
                logprobs: self.logprobs,
            });
        }
        self.reason
    }
}
