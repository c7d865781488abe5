//! The simulator: scheduler, cache and engine double on a virtual clock, from one seed.
//!
//! Every step everything is recounted and every page read is compared. At the end of the traffic
//! the world runs dry: every request has had exactly one final event, and every page is free or
//! cached. What a request said must be what it says alone, or a prefix of it when something cut
//! it short.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rootstock_memory::{CopyEngine, Nanos, TierId};
use rootstock_radix::{Hints, NamespaceId, NamespaceKey, PrefixCache, TenantId, Token};
use rootstock_scheduler::{
    Admission, Class, Emit, FinishReason, NewRequest, RequestId, SamplingParams, Scheduler, Usage,
};

use crate::double::{EngineDouble, Planted};
use crate::report::{Event, Failure, Report};
use crate::rng::Rng;
use crate::swarm::Swarm;
use crate::text;

const EVENTS_KEPT: usize = 50;
/// Steps without anything to run after which a world with requests counts as stuck.
const STALL_MAX: u32 = 100;

/// The caller's side of a request.
#[derive(Debug)]
struct Client {
    new: NewRequest,
    got: Vec<Token>,
    started: bool,
    reason: Option<FinishReason>,
}

/// One world.
#[derive(Debug)]
struct Sim {
    swarm: Swarm,
    rng: Rng,
    now: Nanos,
    step: u64,
    cache: PrefixCache,
    scheduler: Scheduler,
    engine: EngineDouble,
    clients: BTreeMap<RequestId, Client>,
    live: Vec<RequestId>,
    namespaces: Vec<NamespaceId>,
    families: Vec<Vec<Token>>,
    /// Prompts and answers of ended requests, to go on from.
    conversations: VecDeque<(NamespaceId, Vec<Token>)>,
    stalled: u32,
    events: VecDeque<Event>,
    report: Report,
}

/// Runs the world of a seed to its end.
///
/// # Errors
/// The first thing found wrong, a panic of the code under test included.
pub fn run(swarm: Swarm, planted: Planted) -> Result<Report, Box<Failure>> {
    let mut sim = Sim::new(swarm, planted);
    let result = catch_unwind(AssertUnwindSafe(|| sim.run()));
    let finding = match result {
        Ok(Ok(())) => return Ok(sim.report),
        Ok(Err(finding)) => finding,
        Err(panic) => match panic.downcast_ref::<String>() {
            Some(text) => format!("panic: {text}"),
            None => format!("panic: {:?}", panic.downcast_ref::<&str>()),
        },
    };
    let events = sim.events.iter().cloned().collect();
    let failure = Failure {
        seed: sim.swarm.seed,
        step: sim.step,
        finding,
        events,
    };
    // Its leases and pages would complain about being dropped.
    std::mem::forget(sim);
    Err(Box::new(failure))
}

impl Sim {
    fn new(swarm: Swarm, planted: Planted) -> Self {
        let mut rng = Rng::new(swarm.seed);
        let mut cache = PrefixCache::new(&swarm.cache).expect("a swarm is a valid configuration");
        let scheduler =
            Scheduler::new(swarm.scheduler.clone()).expect("a swarm is a valid configuration");
        let namespaces = (0..3)
            .map(|n| {
                let key = NamespaceKey {
                    salt: Some(format!("tenant {n}")),
                    ..base_key()
                };
                cache
                    .namespace(&key)
                    .expect("three namespaces are within the limit")
            })
            .collect();
        let families = (0..swarm.families)
            .map(|_| {
                let len = rng.below(swarm.fresh_max + 1);
                (0..len).map(|_| rng.below(text::VOCAB)).collect()
            })
            .collect();
        let delay = swarm.copy_delay_max;
        let engine = EngineDouble::new(swarm.scheduler.page_tokens, delay, rng.next_u64(), planted);
        Self {
            swarm,
            rng,
            now: 1_000_000_000,
            step: 0,
            cache,
            scheduler,
            engine,
            clients: BTreeMap::new(),
            live: Vec::new(),
            namespaces,
            families,
            conversations: VecDeque::new(),
            stalled: 0,
            events: VecDeque::new(),
            report: Report::default(),
        }
    }

    fn run(&mut self) -> Result<(), String> {
        for _ in 0..self.swarm.steps {
            self.arrive()?;
            self.interfere()?;
            self.turn()?;
        }
        let bound = 2_000 + 400 * self.live.len() as u64 + self.owed_tokens() * 8;
        let end = self.step + bound;
        while !self.live.is_empty() || self.engine.in_flight() > 0 {
            if self.step > end {
                return Err(format!(
                    "{} requests live after {bound} more steps",
                    self.live.len()
                ));
            }
            self.turn()?;
        }
        self.at_rest()
    }

    fn owed_tokens(&self) -> u64 {
        let owed = |id| {
            let client: &Client = &self.clients[id];
            client.new.tokens.len() as u64 + u64::from(client.new.max_tokens)
        };
        self.live.iter().map(owed).sum()
    }

    /// One step of the world.
    fn turn(&mut self) -> Result<(), String> {
        self.step += 1;
        self.now += 1 + u64::from(self.rng.below(self.swarm.step_ns_max));
        if self.rng.percent(self.swarm.clock_jumps) {
            self.now += 300_000_000_000;
        }
        let mut done = Vec::new();
        self.engine.poll(&mut done);
        for copy in done {
            self.cache.copy_done(copy, self.now);
        }
        self.cache.tick(self.now);
        let launched = self.launch()?;
        let flying = self.engine.in_flight();
        if flying > 0 && (!launched || self.rng.percent(self.swarm.early_results)) {
            self.land()?;
        }
        self.stalled = if launched || flying > 0 {
            0
        } else {
            self.stalled + 1
        };
        if !self.live.is_empty() && self.stalled > STALL_MAX {
            return Err(format!(
                "{} requests live and nothing runs",
                self.live.len()
            ));
        }
        self.check()
    }

    /// Asks for a plan and launches it.
    fn launch(&mut self) -> Result<bool, String> {
        let mut out = Vec::new();
        let plan = self.scheduler.schedule(&mut self.cache, self.now, &mut out);
        self.report.events += 1;
        self.hear(out)?;
        let Some(plan) = plan else { return Ok(false) };
        let budget = self.swarm.scheduler.step_tokens;
        let used: u32 = plan
            .rows
            .iter()
            .map(|row| row.len + u32::from(row.drafts))
            .sum();
        if used > budget {
            return Err(format!(
                "step {} computes {used} tokens of {budget}",
                plan.id.0
            ));
        }
        let rows = plan
            .rows
            .iter()
            .map(|row| (row.request.0, row.first_pos, row.len))
            .collect();
        self.log(Event::Launched(plan.id.0, rows));
        self.report.plans = self.report.plans.rotate_left(1) ^ plan.fingerprint();
        self.engine.launch(plan);
        Ok(true)
    }

    /// The oldest step ends, well or badly; now and then two results arrive in the wrong order.
    fn land(&mut self) -> Result<(), String> {
        let swapped = self.engine.in_flight() > 1 && self.rng.percent(self.swarm.swapped_results);
        let mut results = Vec::new();
        for _ in 0..=u32::from(swapped) {
            let fails = self.rng.percent(self.swarm.failures);
            if fails {
                results.extend(self.engine.fail_oldest().map(|step| (step, None)));
            } else {
                let ran = self.engine.run_oldest();
                results.extend(ran.map(|(step, output)| (step, Some(output))));
            }
        }
        while let Some((step, output)) = results.pop() {
            let mut out = Vec::new();
            self.report.events += 1;
            match output {
                Some(output) => {
                    self.log(Event::Landed(step.0));
                    self.scheduler
                        .complete(&mut self.cache, step, &output, self.now, &mut out);
                }
                None => {
                    self.log(Event::Failed(step.0));
                    self.scheduler
                        .fail_step(&mut self.cache, step, self.now, &mut out);
                }
            }
            self.hear(out)?;
        }
        Ok(())
    }

    fn arrive(&mut self) -> Result<(), String> {
        let mut chance = self.swarm.arrivals;
        while chance > 0 && self.live.len() < self.swarm.live_max {
            if self.rng.percent(chance.min(100)) {
                let new = self.invent();
                self.add(new)?;
            }
            chance = chance.saturating_sub(100);
        }
        Ok(())
    }

    fn add(&mut self, new: NewRequest) -> Result<(), String> {
        self.report.events += 1;
        match self.scheduler.add(new.clone(), &self.cache, self.now) {
            Admission::Admitted(id) => {
                let prompt = u32::try_from(new.tokens.len()).unwrap_or(u32::MAX);
                self.log(Event::Added(id, prompt, new.max_tokens));
                self.engine.know(id, new.ns, &new.tokens);
                let client = Client {
                    new,
                    got: Vec::new(),
                    started: false,
                    reason: None,
                };
                if self.clients.insert(id, client).is_some() {
                    return Err(format!("request id {} was given twice", id.0));
                }
                self.live.push(id);
            }
            other @ (Admission::Deferred { .. } | Admission::Rejected(_)) => {
                self.log(Event::NotAdded(format!("{other:?}")));
            }
        }
        Ok(())
    }

    fn invent(&mut self) -> NewRequest {
        let swarm = self.swarm.clone();
        let rng = &mut self.rng;
        let mut ns = *rng.pick(&self.namespaces);
        let mut tokens = rng.pick(&self.families).clone();
        if rng.percent(swarm.turns) && !self.conversations.is_empty() {
            let at = rng.below(u32::try_from(self.conversations.len()).unwrap_or(1)) as usize;
            (ns, tokens) = self.conversations[at].clone();
        }
        let fresh = rng.between(u32::from(tokens.is_empty()), swarm.fresh_max);
        tokens.extend((0..fresh).map(|_| rng.below(text::VOCAB)));
        let spread = i32::try_from(swarm.priority_spread).unwrap_or(0);
        let priority = i32::try_from(rng.below(2 * swarm.priority_spread + 1)).unwrap_or(0);
        let hints = Hints {
            priority: priority - spread,
            jump_s: f64::from(rng.below(swarm.jump_max + 1)),
            strict: rng.below(swarm.strict_spread + 1),
            ..Hints::default()
        };
        let mut sampling = SamplingParams::greedy();
        if rng.percent(swarm.sampled) {
            sampling = SamplingParams {
                temperature: 1.0,
                seed: rng.next_u64(),
                ..sampling
            };
        }
        if rng.percent(swarm.penalties) {
            sampling.frequency_penalty = 0.5;
        }
        let max_tokens = rng.between(1, swarm.output_max);
        NewRequest {
            tenant: TenantId(rng.below(3)),
            ns,
            tokens,
            max_tokens,
            min_tokens: if rng.percent(swarm.minimums) {
                rng.below(max_tokens + 1)
            } else {
                0
            },
            stop_tokens: vec![0, 1],
            ignore_eos: rng.percent(20),
            sampling,
            hints,
            class: if rng.percent(swarm.speculative) {
                Class::Speculative
            } else {
                Class::Client
            },
            deadline: rng
                .percent(swarm.deadlines)
                .then(|| self.now + u64::from(rng.below(u32::MAX)) * 8),
            label: rng.next_u64(),
        }
    }

    /// Callers give up or have enough, now and then about a request that has long ended.
    fn interfere(&mut self) -> Result<(), String> {
        let asks = [
            (self.swarm.aborts, FinishReason::Aborted),
            (self.swarm.stop_strings, FinishReason::StopString),
        ];
        for (percent, reason) in asks {
            if !self.rng.percent(percent) || self.clients.is_empty() {
                continue;
            }
            let id = if self.rng.percent(90) && !self.live.is_empty() {
                *self.rng.pick(&self.live)
            } else {
                let all = u32::try_from(self.clients.len()).unwrap_or(u32::MAX);
                let at = self.rng.below(all) as usize;
                *self
                    .clients
                    .keys()
                    .nth(at)
                    .expect("an index below the length")
            };
            self.log(Event::Asked(id, reason));
            self.report.events += 1;
            let had = self.clients[&id].reason.is_some();
            let end = if reason == FinishReason::Aborted {
                self.scheduler.abort(&mut self.cache, id, self.now)
            } else {
                self.scheduler.finish(&mut self.cache, id, reason, self.now)
            };
            // A displaced request has ended, but its caller hears of it with the next events.
            let heard = self.report.ended.get("Displaced").copied().unwrap_or(0);
            let unheard = self.scheduler.stats().displaced > heard;
            if end.is_some() == had && !(end.is_none() && unheard) {
                return Err(format!(
                    "request {}: ended before: {had}, now: {end:?}",
                    id.0
                ));
            }
            self.hear(end.into_iter().collect())?;
        }
        Ok(())
    }

    /// Events reach their clients.
    fn hear(&mut self, events: Vec<Emit>) -> Result<(), String> {
        for emit in events {
            self.report.events += 1;
            let id = emit.request();
            let Some(client) = self.clients.get_mut(&id) else {
                return Err(format!("an event of nobody: {emit:?}"));
            };
            if client.reason.is_some() || client.new.label != emit.label() {
                return Err(format!(
                    "after the final event, or to the wrong caller: {emit:?}"
                ));
            }
            match emit {
                Emit::Started { .. } if client.started => {
                    return Err(format!("request {} started twice", id.0));
                }
                Emit::Started { .. } => client.started = true,
                Emit::Tokens { tokens, .. } => {
                    if tokens.is_empty() || !client.started {
                        return Err(format!("request {}: no tokens, or before the start", id.0));
                    }
                    client.got.extend(tokens);
                }
                Emit::Final { reason, usage, .. } => {
                    client.reason = Some(reason);
                    self.live.retain(|&other| other != id);
                    self.log(Event::Ended(id, reason));
                    *self.report.ended.entry(format!("{reason:?}")).or_default() += 1;
                    self.judge(id, reason, usage)?;
                }
            }
        }
        Ok(())
    }

    /// Compares what a request said with what it says alone.
    fn judge(&mut self, id: RequestId, reason: FinishReason, usage: Usage) -> Result<(), String> {
        let client = &self.clients[&id];
        let limit = self.swarm.scheduler.max_model_len;
        let (alone, alone_reason) = text::alone(&client.new, limit);
        let bad = |what: &str| Err(format!("request {} ended {reason:?}: {what}", id.0));
        if !alone.starts_with(&client.got) {
            return bad(&format!("said {:?}, alone {alone:?}", client.got));
        }
        let whole = client.got.len() == alone.len();
        let prompt = client.new.tokens.len();
        let page = self.swarm.scheduler.page_tokens;
        let slots = self.swarm.cache.device_pages[0] as usize * page as usize;
        match reason {
            FinishReason::Stop | FinishReason::Length if !whole || reason != alone_reason => {
                return bad(&format!(
                    "alone {alone_reason:?} after {} tokens",
                    alone.len()
                ));
            }
            FinishReason::OutOfPages if prompt + client.got.len() <= slots => {
                return bad(&format!(
                    "{prompt} + {} tokens, {slots} slots",
                    client.got.len()
                ));
            }
            FinishReason::TooManyPreemptions
                if usage.preemptions < self.swarm.scheduler.max_preemptions =>
            {
                return bad(&format!("after {} preemptions", usage.preemptions));
            }
            FinishReason::Failed(_) if self.swarm.failures == 0 => return bad("no step failed"),
            FinishReason::Displaced
            | FinishReason::Stop
            | FinishReason::Length
            | FinishReason::OutOfPages
            | FinishReason::TooManyPreemptions
            | FinishReason::Failed(_)
            | FinishReason::StopString
            | FinishReason::Aborted
            | FinishReason::Expired => {}
        }
        let cached = usage.cached.total();
        if usage.prompt_tokens as usize != prompt
            || usage.completion_tokens as usize != client.got.len()
            || cached as usize >= prompt
            || !cached.is_multiple_of(page)
        {
            return bad(&format!(
                "usage {usage:?} for {prompt} + {}",
                client.got.len()
            ));
        }
        if self.conversations.len() >= 16 {
            self.conversations.pop_front();
        }
        let mut tokens = client.new.tokens.clone();
        tokens.extend(&client.got);
        if tokens.len() < slots {
            self.conversations.push_back((client.new.ns, tokens));
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), String> {
        self.scheduler
            .check(&self.cache)
            .map_err(|found| found.to_string())?;
        self.cache.check().map_err(|found| found.to_string())?;
        let stats = self.cache.stats();
        if stats.stray_releases > 0 {
            return Err(format!("{} pages released twice", stats.stray_releases));
        }
        self.engine.finding.take().map_or(Ok(()), Err)
    }

    /// The idle law: nothing is held, every page is free or cached.
    fn at_rest(&mut self) -> Result<(), String> {
        let tier = TierId::Device(self.swarm.scheduler.replica);
        for tier in &self.cache.stats().tiers {
            let busy = tier.leased + tier.held + tier.in_transit;
            if busy > 0 || tier.free + tier.evictable != tier.total {
                return Err(format!("at rest: {tier:?}"));
            }
        }
        if !self.scheduler.is_idle() || self.cache.available(tier) != self.cache.total(tier) {
            return Err("at rest, but the scheduler is not idle".to_owned());
        }
        let stats = self.scheduler.stats();
        self.report.steps = self.step;
        self.report.preemptions = stats.preemptions;
        self.report.cached_tokens = stats.cached_tokens;
        self.report.shared_tokens = stats.shared_tokens;
        self.report.rows = self.engine.rows_run;
        self.report.rows_ahead = self.engine.rows_ahead;
        self.report.rows_many = self.engine.rows_many;
        self.cache
            .flush(self.now)
            .map_err(|refused| format!("at rest: {refused:?}"))
    }

    fn log(&mut self, event: Event) {
        if self.events.len() >= EVENTS_KEPT {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}

/// Namespace of the simulated model without a salt.
pub fn base_key() -> NamespaceKey {
    NamespaceKey {
        model: "double".to_owned(),
        numerics: "fingerprint".to_owned(),
        lora: None,
        salt: None,
    }
}
