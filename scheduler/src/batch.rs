//! One step: who computes what within the token budget.
//!
//! The budget goes to decodes first (one token each, so that nobody who is being served
//! stutters), then to prompts: running prefills and waiting requests in one order, so that an
//! urgent newcomer does not wait behind a long prompt that was there before. A waiting request
//! that does not fit is passed by others until its patience (the aging period) is over; from
//! then on pages are left to gather for it. What is left of the budget lets rows guess ahead,
//! where the backend speculates.
//!
//! Rows are drafted first and committed last (`draft.rs`). Until then a row can still be
//! withdrawn, because its request is chosen to give way to a more important one.

use rootstock_memory::Nanos;
use rootstock_radix::{Key, PrefixCache, Short};

use crate::admit::Denied;
use crate::draft::{Draft, DraftRow};
use crate::emit::{Emit, FinishReason};
use crate::holding::{device, pages_for};
use crate::live::{Live, Next, Phase, Running};
use crate::preempt::Relief;
use crate::request::{Class, RequestId};
use crate::scheduler::{Cx, Scheduler};
use crate::step::StepPlan;
use crate::time::StepLoad;
use crate::walk::Turn;

/// Waiting requests that may be tried in vain in one step.
const TRIES_MAX: u32 = 16;

impl Scheduler {
    /// The next step, or None: nothing can run now, or `max_in_flight` steps are out, and one that
    /// overtakes. With nothing to compute but copies to start it has no rows.
    ///
    /// None stands until something changes: a request comes or goes, a step lands, a copy is
    /// acknowledged, or a time of [`Scheduler::due_at`] passes. Ask again after each of them, for
    /// as long as plans come.
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
        let full = self.flights.len() >= usize::from(self.cfg.max_in_flight);
        if full && !self.may_overtake() {
            return None;
        }
        self.shed_idle_work(cx);
        self.open_gate(cx.cache, now);
        self.reorder(cx.cache, now);
        if full {
            return self.plan_overtaking(cx);
        }
        self.turned_away = None;
        let tier = device(self.cfg.replica);
        loop {
            let budget = self.step_budget(self.decode_load());
            let mut draft = Draft::new(budget, self.idle_budget());
            self.settle_fetches(cx, &mut draft);
            let mut denied = None;
            let hurried = self.plan_hurried(cx, &mut draft);
            if !hurried {
                draft.budget = budget;
                let order = self.decode_order(budget as usize);
                self.plan_decodes(cx, &mut draft, order);
                denied = self.plan_prompts(cx, &mut draft);
            }
            self.admit_by_rank(cx, &mut draft);
            cx.cache
                .drain_copies_of(self.cfg.replica, &mut draft.copies);
            if !draft.rows.is_empty() || !draft.copies.is_empty() {
                if !hurried {
                    self.plan_guesses(cx, &mut draft);
                }
                return Some(self.commit(cx, draft));
            }
            let alone = self.running.is_empty() && self.draining.is_empty();
            match denied.filter(|_| alone && cx.cache.copies_at(tier) == 0) {
                // It has every page that can be had, and they are too few.
                Some(id) => self.end(cx, id, FinishReason::OutOfPages),
                None => return None,
            }
        }
    }

    /// Tokens the next step may compute, `decodes` among them: `step_tokens`, or what fits the
    /// target time.
    pub(crate) fn step_budget(&self, decodes: StepLoad) -> u32 {
        let most = self.cfg.step_tokens;
        if self.cfg.target_step_ms == 0 {
            return most;
        }
        let prefilling = self
            .seated()
            .filter(|live| matches!(live.next(), Next::Prefill(_)));
        let launched = prefilling.filter_map(|live| Some(live.running()?.launched));
        let kv_per_token = u64::from(launched.max().unwrap_or(0));
        let target = u64::from(self.cfg.target_step_ms) * 1_000_000;
        let Some(tokens) = self.time.tokens_within(target, decodes, kv_per_token) else {
            return most;
        };
        decodes
            .tokens
            .saturating_add(tokens.max(self.cfg.page_tokens))
            .min(most)
    }

    /// Brings the keys of the queue up to date: all that are due by aging, and a bounded number
    /// by a new look at the cache.
    fn reorder(&mut self, cache: &PrefixCache, now: Nanos) {
        while let Some(id) = self.queue.pop_aged(now) {
            self.enqueue(id, now);
        }
        for id in self.take_rematch(cache) {
            let found = self.probe(cache, &self.live[&id]);
            let live = self
                .live
                .get_mut(&id)
                .expect("a request in the queue is live");
            let (cached, on_device) = found;
            live.device_probe = on_device;
            if cached != live.cached_probe {
                live.cached_probe = cached;
                self.enqueue(id, now);
            }
        }
    }

    pub(crate) fn plan_decodes(
        &mut self,
        cx: &mut Cx<'_>,
        draft: &mut Draft,
        order: Vec<RequestId>,
    ) {
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
    pub(crate) fn decode_order(&self, budget: usize) -> Vec<RequestId> {
        let mut ready: Vec<&Live> = self.decoding().collect();
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
        let mut walk = self.walk(cx.now);
        let tier = device(self.cfg.replica);
        if let Some(id) = self.claim {
            match self.start(cx, draft, id) {
                Ok(()) => {}
                Err(_) if self.someone_yields() || cx.cache.copies_at(tier) > 0 => walk.close(),
                Err(_) => self.claim = None,
            }
        }
        let (mut first_denied, mut tries) = (None, 0);
        while draft.budget > 0 {
            match walk.next(&self.queue) {
                Some(Turn::Prefill(id)) => self.plan_chunk(cx, draft, id),
                Some(Turn::Waiting(id)) => {
                    if self.is_under_way(cx, draft, id) {
                        continue;
                    }
                    let Err(denied) = self.start(cx, draft, id) else {
                        continue;
                    };
                    tries += 1;
                    if denied != Denied::Coming {
                        self.turned_away = self.turned_away.or(Some(id));
                    }
                    let impatient = self.live[&id].waited(cx.now) > self.patience_ns();
                    let waits = impatient && denied != Denied::Coming;
                    if waits || denied == Denied::Seats || tries >= TRIES_MAX {
                        walk.close();
                    }
                    if let Denied::Pages { in_transit: 0, .. } = denied {
                        first_denied = first_denied.or(Some(id));
                    }
                }
                None => break,
            }
        }
        first_denied
    }

    /// Admits a waiting request and drafts its first row.
    pub(crate) fn start(
        &mut self,
        cx: &mut Cx<'_>,
        draft: &mut Draft,
        id: RequestId,
    ) -> Result<(), Denied> {
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
        if self.computed_by_another(draft, id) {
            return;
        }
        let live = &self.live[&id];
        let idle = live.class == Class::Speculative;
        let budget = match idle {
            true => draft.budget.min(draft.idle_budget),
            false => draft.budget,
        };
        if budget == 0 {
            return;
        }
        self.begin_in_transit(cx, id);
        let live = &self.live[&id];
        let len = match live.next() {
            Next::Wait => return,
            Next::Decode => 1,
            Next::Prefill(known) => {
                let page = self.cfg.page_tokens;
                let launched = live.running().map_or(0, |run| run.launched);
                let end = launched + known.min(budget);
                let aligned = end - end % page;
                let cut_short = known > budget && aligned > launched;
                if cut_short {
                    aligned - launched
                } else {
                    end - launched
                }
            }
        };
        if idle {
            draft.idle_budget = draft.idle_budget.saturating_sub(len);
        }
        let planned = self.plan_row(cx, draft, id, len);
        assert!(
            planned.is_ok(),
            "the pages of a prompt are reserved at admission"
        );
    }

    /// Whether a row of this step or of one in flight computes the very page this request needs
    /// next. Then it waits for that row instead of computing the page a second time: what
    /// arrives together is computed once.
    pub(crate) fn computed_by_another(&self, draft: &Draft, id: RequestId) -> bool {
        let page = self.cfg.page_tokens;
        let live = &self.live[&id];
        let from = match live.running() {
            Some(run) => run.launched,
            None => live.cached_probe - live.cached_probe % page,
        };
        let to = from + page;
        if !from.is_multiple_of(page) || to >= live.len() {
            return false;
        }
        let wanted = &live.tokens[..to as usize];
        let same = |other: &Live| {
            let tokens = other.tokens.get(..to as usize);
            // The page itself differs most often, so it is compared first.
            other.ns == live.ns
                && tokens.is_some_and(|t| t[from as usize..] == wanted[from as usize..])
                && tokens == Some(wanted)
        };
        let drafted = |row: &DraftRow| {
            let covers = row.first_pos <= from && row.first_pos + row.len >= to;
            row.id != id && covers && same(&self.live[&row.id])
        };
        let in_flight = |other: &Live| {
            let covers = |run: &Running| run.computed <= from && run.launched >= to;
            other.id != id && other.running().is_some_and(covers) && same(other)
        };
        draft.rows.iter().any(drafted) || self.seated().any(in_flight)
    }

    /// Whether storage is being read for a waiting request: a wait that the reader bounds.
    pub(crate) fn is_read(&self, cx: &Cx<'_>, id: RequestId) -> bool {
        let Live { ns, tokens, .. } = &self.live[&id];
        cx.cache.is_reading(Key { ns: *ns, tokens })
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
        // Its pages may be others by now. Where the copy failed, its steps in flight fail, and the
        // request with them.
        if !live.settle_in_transit(cx, &mut self.stats) {
            return Ok(());
        }
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
            guesses_at: None,
            draws,
            from,
        });
        Ok(())
    }
}
