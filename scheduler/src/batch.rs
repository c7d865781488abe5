//! One step: who computes what within the token budget.
//!
//! The budget goes to decodes first (one token each, so that nobody who is being served
//! stutters), then to prompts: running prefills and waiting requests in one order, so that an
//! urgent newcomer does not wait behind a long prompt that was there before. A waiting request
//! that does not fit is passed by others until its patience (the aging period) is over; from
//! then on pages are left to gather for it.
//!
//! What is left of the budget lets rows guess ahead, where the backend speculates.
//!
//! Rows are drafted first and committed last. Until then a row can still be withdrawn, because
//! its request is chosen to give way to a more important one.

use rootstock_memory::{CopyPlan, Nanos, StepId};
use rootstock_radix::{Key, PrefixCache, Short};
use std::sync::Arc;

use crate::admit::Denied;
use crate::emit::{Emit, FinishReason};
use crate::holding::pages_for;
use crate::live::{Live, Next, Phase, count};
use crate::policy::QueueKey;
use crate::preempt::Relief;
use crate::request::RequestId;
use crate::scheduler::{Cx, Scheduler};
use crate::settle::{Flight, FlightRow};
use crate::step::{History, Row, RowInput, SampleSpec, StepPlan};

/// Waiting requests that may be tried in vain in one step.
const TRIES_MAX: u32 = 16;
/// First of the queue that are looked up in the cache each step.
const PROBE_HEAD: usize = 4;
/// Others of the queue that are looked up in the cache each step.
const PROBE_ROUND: usize = 8;

/// A step in the making.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) budget: u32,
    rows: Vec<DraftRow>,
    pub(crate) copies: Vec<CopyPlan>,
    /// Pages that running requests wait for, out of those that are coming.
    pub(crate) owed_pages: u32,
}

#[derive(Clone, Copy, Debug)]
struct DraftRow {
    id: RequestId,
    first_pos: u32,
    len: u32,
    drafts: u8,
    draws: bool,
    from: Option<(StepId, u32)>,
}

impl Draft {
    fn new(budget: u32) -> Self {
        Self {
            budget,
            rows: Vec::new(),
            copies: Vec::new(),
            owed_pages: 0,
        }
    }

    fn push(&mut self, row: DraftRow) {
        self.budget -= row.len + u32::from(row.drafts);
        self.rows.push(row);
    }

    /// Takes a request's row back out.
    pub(crate) fn withdraw(&mut self, id: RequestId) {
        if let Some(at) = self.rows.iter().position(|row| row.id == id) {
            let row = self.rows.remove(at);
            self.budget += row.len + u32::from(row.drafts);
        }
    }
}

impl Scheduler {
    /// The next step, or None: nothing can run now, or `max_in_flight` steps are out.
    ///
    /// `out` receives admissions, and final events of requests that expired or ran out of pages.
    /// Everything a row needs is reserved before anything is taken; a request that gets no row
    /// holds what it held.
    ///
    /// # Cost
    /// O(running log running) plus what is computed; a bounded number of looks at the cache for
    /// those who wait, whatever their number.
    pub fn schedule(
        &mut self,
        cache: &mut PrefixCache,
        now: Nanos,
        out: &mut Vec<Emit>,
    ) -> Option<StepPlan> {
        out.append(&mut self.outbox);
        let cx = &mut Cx { cache, now, out };
        self.expire(cx);
        if self.flights.len() >= usize::from(self.cfg.max_in_flight) {
            return None;
        }
        self.reorder(cx.cache, now);
        loop {
            let mut draft = Draft::new(self.cfg.step_tokens);
            self.plan_decodes(cx, &mut draft);
            let denied = self.plan_prompts(cx, &mut draft);
            self.admit_by_rank(cx, &mut draft);
            if !draft.rows.is_empty() || !draft.copies.is_empty() {
                self.plan_guesses(cx, &mut draft);
                return Some(self.commit(draft));
            }
            match denied.filter(|_| self.running.is_empty() && self.draining.is_empty()) {
                // It has every page that can be had, and they are too few.
                Some(id) => self.end(cx, id, FinishReason::OutOfPages),
                None => return None,
            }
        }
    }

    /// Brings the keys of the queue up to date: all that are due by aging, and a bounded number
    /// by a new look at the cache.
    fn reorder(&mut self, cache: &PrefixCache, now: Nanos) {
        while let Some(id) = self.queue.pop_aged(now) {
            self.enqueue(id, now);
        }
        for id in self.queue.take_probes(PROBE_HEAD, PROBE_ROUND) {
            let found = self.probe(cache, &self.live[&id]);
            let live = self
                .live
                .get_mut(&id)
                .expect("a request in the queue is live");
            if found != live.cached_probe {
                live.cached_probe = found;
                self.enqueue(id, now);
            }
        }
    }

    fn plan_decodes(&mut self, cx: &mut Cx<'_>, draft: &mut Draft) {
        let order = self.decode_order(draft.budget as usize);
        for id in order {
            let ready = self
                .live
                .get(&id)
                .is_some_and(|live| live.next() == Next::Decode);
            if draft.budget == 0 || !ready {
                continue;
            }
            loop {
                match self.plan_row(cx, draft, id, 1) {
                    Ok(()) => break,
                    Err(short) => match self.relieve(cx, id, &short, draft) {
                        Relief::Freed => {}
                        Relief::Wait | Relief::Gone => break,
                    },
                }
            }
        }
    }

    /// Decoding requests, last to give way first; when the budget is too small for all, those
    /// that have not been served for longest.
    fn decode_order(&self, budget: usize) -> Vec<RequestId> {
        let mut ready: Vec<&Live> = self
            .running
            .iter()
            .map(|id| &self.live[id])
            .filter(|live| live.next() == Next::Decode)
            .collect();
        if ready.len() > budget {
            ready.sort_by_key(|live| (live.running().and_then(|run| run.last_row), live.id));
            ready.truncate(budget);
        }
        ready.sort_by_key(|live| std::cmp::Reverse(live.victim_key(self.cfg.max_preemptions)));
        ready.iter().map(|live| live.id).collect()
    }

    /// Fills the rest of the budget with prompts. Returns the first waiting request that could
    /// not start for want of pages while no copy would free any.
    fn plan_prompts(&mut self, cx: &mut Cx<'_>, draft: &mut Draft) -> Option<RequestId> {
        let mut walk = Walk::new(self.prefill_order(cx.now));
        if let Some(id) = self.claim {
            match self.start(cx, draft, id) {
                Ok(()) => {}
                Err(_) if self.someone_yields() => walk.open = false,
                Err(_) => self.claim = None,
            }
        }
        let mut first_denied = None;
        while draft.budget > 0 {
            let queued = self.queue.next_after(walk.after).filter(|_| walk.open);
            let prefill = walk.prefills.get(walk.at).copied();
            match (prefill, queued) {
                (Some(key), other) if other.is_none_or(|q| key < q) => {
                    walk.at += 1;
                    self.plan_chunk(cx, draft, key.id);
                }
                (_, Some(key)) => {
                    walk.after = Some(key);
                    let Err(denied) = self.start(cx, draft, key.id) else {
                        continue;
                    };
                    walk.tries += 1;
                    let impatient = self.live[&key.id].waited(cx.now) > self.patience_ns();
                    if impatient || denied == Denied::Seats || walk.tries >= TRIES_MAX {
                        walk.open = false;
                    }
                    if let Denied::Pages { in_transit: 0, .. } = denied {
                        first_denied = first_denied.or(Some(key.id));
                    }
                }
                (Some(_), None) | (None, None) => break,
            }
        }
        first_denied
    }

    fn prefill_order(&self, now: Nanos) -> Vec<QueueKey> {
        let live = self.running.iter().map(|id| &self.live[id]);
        let prefills = live.filter(|live| matches!(live.next(), Next::Prefill(_)));
        let mut keys: Vec<QueueKey> = prefills
            .map(|live| self.order.key(&live.key_parts(&self.order, now)))
            .collect();
        keys.sort_unstable();
        keys
    }

    /// Admits a waiting request and drafts its first row.
    fn start(&mut self, cx: &mut Cx<'_>, draft: &mut Draft, id: RequestId) -> Result<(), Denied> {
        let mut copies = self.admit(cx, id)?;
        draft.copies.append(&mut copies);
        self.plan_chunk(cx, draft, id);
        Ok(())
    }

    /// Drafts as much of a prompt as the budget allows; its pages were reserved at admission.
    /// What others computed meanwhile is taken over first.
    pub(crate) fn plan_chunk(&mut self, cx: &mut Cx<'_>, draft: &mut Draft, id: RequestId) {
        if draft.budget == 0 {
            return;
        }
        self.take_over(cx, id);
        let live = &self.live[&id];
        let len = match live.next() {
            Next::Wait => return,
            Next::Decode => 1,
            Next::Prefill(known) => {
                let page = self.cfg.page_tokens;
                let launched = live.running().map_or(0, |run| run.launched);
                let end = launched + known.min(draft.budget);
                let aligned = end - end % page;
                let cut_short = known > draft.budget && aligned > launched;
                if cut_short {
                    aligned - launched
                } else {
                    end - launched
                }
            }
        };
        let planned = self.plan_row(cx, draft, id, len);
        assert!(
            planned.is_ok(),
            "the pages of a prompt are reserved at admission"
        );
    }

    fn take_over(&mut self, cx: &mut Cx<'_>, id: RequestId) {
        let live = self.live.get_mut(&id).expect("a running request is live");
        if !matches!(live.next(), Next::Prefill(_)) {
            return;
        }
        let max = live.len() - 1;
        let Live {
            tokens, ns, phase, ..
        } = live;
        let Phase::Running(run) = phase else { return };
        let key = Key { ns: *ns, tokens };
        let busy = run.flight.last().copied();
        self.stats.shared_tokens += u64::from(run.hold.share(cx.cache, key, max, busy, cx.now));
        run.computed = run.computed.max(run.hold.leased_tokens());
        run.launched = run.launched.max(run.hold.leased_tokens());
    }

    /// Drafts a row of `len` positions.
    fn plan_row(
        &mut self,
        cx: &mut Cx<'_>,
        draft: &mut Draft,
        id: RequestId,
        len: u32,
    ) -> Result<(), Short> {
        let page_tokens = self.cfg.page_tokens;
        let live = self.live.get_mut(&id).expect("a running request is live");
        let known = live.len();
        let Some(run) = live.running_mut() else {
            return Ok(());
        };
        let end = run.launched + len;
        let draws = end >= known;
        let mut copies = run
            .hold
            .take(cx.cache, pages_for(end, page_tokens), cx.now)?;
        draft.copies.append(&mut copies);
        let from = if run.pending > 0 { run.last_row } else { None };
        draft.push(DraftRow {
            id,
            first_pos: run.launched,
            len,
            drafts: 0,
            draws,
            from,
        });
        Ok(())
    }

    /// Lets rows that draw guess on with what nobody else needs of budget and pages.
    fn plan_guesses(&mut self, cx: &mut Cx<'_>, draft: &mut Draft) {
        let page_tokens = self.cfg.page_tokens;
        for row in draft
            .rows
            .iter_mut()
            .filter(|row| row.draws && row.from.is_none())
        {
            let live = self
                .live
                .get_mut(&row.id)
                .expect("a drafted row is of a live request");
            if !live.can_draft(live.output_len()) {
                continue;
            }
            let room = live.output_max - live.output_len() - 1;
            let wanted = u32::from(self.cfg.max_drafts).min(room).min(draft.budget);
            let Some(run) = live.running_mut() else {
                continue;
            };
            let end = row.first_pos + row.len;
            let pages = pages_for(end + wanted, page_tokens);
            if let Ok(mut copies) = run.hold.take(cx.cache, pages, cx.now) {
                draft.copies.append(&mut copies);
            }
            let slots = count(run.hold.table().len()) * page_tokens - end;
            row.drafts = u8::try_from(wanted.min(slots)).unwrap_or(u8::MAX);
            draft.budget -= u32::from(row.drafts);
        }
    }

    /// Turns a draft into a plan and its rows into rows in flight.
    fn commit(&mut self, draft: Draft) -> StepPlan {
        let step = self.step_id();
        let mut plan = StepPlan {
            id: step,
            replica: self.cfg.replica,
            rows: Vec::with_capacity(draft.rows.len()),
            tokens: Vec::new(),
            page_tables: Vec::new(),
            copies: draft.copies,
            after: Vec::new(),
        };
        let mut rows = Vec::with_capacity(draft.rows.len());
        for (index, row) in draft.rows.iter().enumerate() {
            let live = self
                .live
                .get_mut(&row.id)
                .expect("a drafted row is of a live request");
            append_row(&mut plan, live, row, self.cfg.page_tokens);
            let run = live
                .running_mut()
                .expect("a drafted row is of a running request");
            run.launched = row.first_pos + row.len;
            run.pending += u32::from(row.draws);
            run.drafting = row.drafts > 0;
            run.flight.push(step);
            run.last_row = Some((step, count(index)));
            live.work += u64::from(row.len);
            self.stats.computed_tokens += u64::from(row.len);
            let end = row.first_pos + row.len;
            rows.push(FlightRow {
                id: row.id,
                end,
                drafts: row.drafts,
                draws: row.draws,
            });
        }
        self.stats.steps += 1;
        self.flights.push_back(Flight::new(step, rows));
        plan
    }
}

/// Where the walk over prompts stands.
struct Walk {
    prefills: Vec<QueueKey>,
    at: usize,
    after: Option<QueueKey>,
    tries: u32,
    /// Whether waiting requests may still start.
    open: bool,
}

impl Walk {
    fn new(prefills: Vec<QueueKey>) -> Self {
        Self {
            prefills,
            at: 0,
            after: None,
            tries: 0,
            open: true,
        }
    }
}

fn append_row(plan: &mut StepPlan, live: &Live, row: &DraftRow, page_tokens: u32) {
    let run = live
        .running()
        .expect("a drafted row is of a running request");
    let first_token = count(plan.tokens.len());
    let input = match row.from {
        Some((step, index)) => {
            plan.tokens.push(0);
            RowInput::FromStep { step, row: index }
        }
        None => {
            let span = row.first_pos as usize..(row.first_pos + row.len) as usize;
            plan.tokens.extend_from_slice(&live.tokens[span]);
            RowInput::Known
        }
    };
    let first_page = count(plan.page_tables.len());
    let covered = row.first_pos + row.len + u32::from(row.drafts);
    let pages = pages_for(covered, page_tokens);
    plan.page_tables
        .extend_from_slice(&run.hold.table()[..pages as usize]);
    plan.rows.push(Row {
        request: live.id,
        ns: live.ns,
        tokens: first_token..count(plan.tokens.len()),
        input,
        first_pos: row.first_pos,
        len: row.len,
        pages: first_page..count(plan.page_tables.len()),
        sample: row.draws.then(|| sample_spec(live, run.pending)),
        drafts: row.drafts,
        mask: None,
    });
}

fn sample_spec(live: &Live, pending: u32) -> SampleSpec {
    let output_index = live.output_len() + pending;
    let bound = output_index < live.suppress_until();
    SampleSpec {
        params: Arc::clone(&live.sampling),
        output_index,
        suppress: bound.then(|| Arc::clone(&live.stop_tokens)),
        history: live.sampling.has_penalties().then(|| History {
            tokens: live.tokens.clone(),
            prompt_tokens: live.prompt_tokens,
        }),
    }
}
