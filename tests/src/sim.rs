//! The simulator: the serving core and an engine double on a virtual clock, from one seed.
//!
//! Up to three replicas share a host tier; copies are slow and may fail. Every turn (or, in long
//! runs, every so many turns) everything is recounted; every page read is compared. At the end of
//! the traffic the world runs dry: every request has had exactly one final event, and every page
//! is free or cached. What a request said must be what it says alone, or a prefix of it when
//! something cut it short (`judge.rs`). What is pinned must be found while the pin lasts.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rootstock::{CoreConfig, Limits, ServingCore};
use rootstock_memory::{CopyEngine, Nanos, ReplicaId};
use rootstock_radix::{
    Action, Key, NamespaceId, NamespaceKey, Outcome, Target, TenantId, Token, Ttl,
};
use rootstock_scheduler::{Admission, CachedTokens, FinishReason, NewRequest, RequestId};

use crate::double::EngineDouble;
use crate::planted::Planted;
use crate::report::{Event, Failure, Report};
use crate::rng::Rng;
use crate::swarm::Swarm;
use crate::text;

const EVENTS_KEPT: usize = 50;
/// Steps without anything to run after which a world with requests counts as stuck.
const STALL_MAX: u32 = 100;

/// Promises of pins that are watched at a time.
const PROMISES_MAX: usize = 32;

/// The caller's side of a request.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) new: NewRequest,
    pub(crate) arrival: Nanos,
    pub(crate) pin_epoch: (u64, u64),
    pub(crate) got: Vec<Token>,
    pub(crate) started: Option<CachedTokens>,
    pub(crate) reason: Option<FinishReason>,
}

/// A pinned prefix and until when at least it is pinned.
#[derive(Debug)]
pub(crate) struct Promise {
    pub(crate) ns: NamespaceId,
    pub(crate) tokens: Vec<Token>,
    pub(crate) until: Nanos,
}

/// One world.
#[derive(Debug)]
pub(crate) struct Sim {
    pub(crate) swarm: Swarm,
    pub(crate) rng: Rng,
    pub(crate) now: Nanos,
    step: u64,
    pub(crate) core: ServingCore,
    pub(crate) engine: EngineDouble,
    planted: Planted,
    /// Occasions of the planted kind so far.
    occasions: u32,
    pub(crate) clients: BTreeMap<RequestId, Client>,
    pub(crate) live: Vec<RequestId>,
    pub(crate) namespaces: Vec<NamespaceId>,
    pub(crate) families: Vec<Vec<Token>>,
    /// Prompts and answers of ended requests, to go on from.
    pub(crate) conversations: VecDeque<(NamespaceId, Vec<Token>)>,
    pub(crate) promises: Vec<Promise>,
    pins_yielded: u64,
    /// Releases and flushes.
    unpins: u64,
    stalled: u32,
    events: VecDeque<Event>,
    pub(crate) report: Report,
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
        swarm: sim.swarm.clone(),
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
        let config = CoreConfig {
            cache: swarm.cache.clone(),
            scheduler: swarm.scheduler.clone(),
            limits: Limits::default(),
            router: swarm.router.clone(),
        };
        let mut core = ServingCore::new(config).expect("a swarm is a valid configuration");
        let namespaces = (0..3)
            .map(|n| {
                let key = NamespaceKey {
                    salt: Some(format!("tenant {n}")),
                    ..base_key()
                };
                core.namespace(&key)
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
        let mut engine =
            EngineDouble::new(swarm.scheduler.page_tokens, delay, rng.next_u64(), planted);
        engine.copy_failures = swarm.copy_failures;
        engine.completes_histories = swarm.scheduler.late_history;
        engine.orders_layers = swarm.scheduler.begin_in_transit;
        engine.pauses = !swarm.seed.is_multiple_of(4);
        Self {
            swarm,
            rng,
            now: 1_000_000_000,
            step: 0,
            core,
            engine,
            planted,
            occasions: 0,
            clients: BTreeMap::new(),
            live: Vec::new(),
            namespaces,
            families,
            conversations: VecDeque::new(),
            promises: Vec::new(),
            pins_yielded: 0,
            unpins: 0,
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
        while !self.live.is_empty() || !self.at_ease() {
            if self.step > end {
                let copies = self.core.copies_under_way();
                return Err(format!(
                    "{} requests live, {copies} copies under way after {bound} more steps",
                    self.live.len()
                ));
            }
            self.turn()?;
        }
        self.at_rest()
    }

    /// No step is out, and no copy.
    fn at_ease(&self) -> bool {
        self.engine.in_flight() == 0 && self.core.copies_under_way() == 0
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
            self.meet_all("clock jump");
            self.now += 300_000_000_000;
        }
        let mut done = Vec::new();
        self.engine.poll(&mut done);
        for copy in done {
            self.report.events += 1;
            if !copy.ok {
                self.meet_all("failed copy");
            }
            if self.is_time(|p| matches!(p, Planted::LostAck(_))) {
                continue;
            }
            self.core.copy_done(copy, self.now);
            if self.is_time(|p| matches!(p, Planted::DoubledAck(_))) {
                self.core.copy_done(copy, self.now);
            }
        }
        self.core.tick(self.now);
        let (mut launched, mut flying) = (false, false);
        for replica in self.replicas() {
            let planned = self.launch(replica)?;
            let out = self.engine.in_flight_of(replica) > 0;
            if out && (!planned || self.rng.percent(self.swarm.early_results)) {
                self.land(replica)?;
            }
            launched |= planned;
            flying |= out;
        }
        let moves = launched || flying || self.engine.copies_under_way() > 0;
        self.stalled = if moves { 0 } else { self.stalled + 1 };
        if !self.live.is_empty() && self.stalled > STALL_MAX {
            return Err(format!(
                "{} requests live and nothing runs",
                self.live.len()
            ));
        }
        if self.step.is_multiple_of(u64::from(self.swarm.check_every)) {
            self.check()?;
        }
        self.engine.finding.take().map_or(Ok(()), Err)
    }

    fn replicas(&self) -> impl Iterator<Item = ReplicaId> + use<> {
        let count = u16::try_from(self.swarm.cache.device_pages.len()).unwrap_or(1);
        (0..count).map(ReplicaId)
    }

    /// Asks for a plan and launches it.
    fn launch(&mut self, replica: ReplicaId) -> Result<bool, String> {
        let plan = self.core.schedule(replica, self.now);
        self.report.events += 1;
        self.hear()?;
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
        if used == 0 && plan.copies.is_empty() {
            return Err(format!("step {} has nothing to do", plan.id.0));
        }
        let rows = plan
            .rows
            .iter()
            .map(|row| (row.request.0, row.first_pos, row.len))
            .collect();
        self.log(Event::Launched(plan.id.0, rows, plan.copies.len()));
        self.report.plans = self.report.plans.rotate_left(1) ^ plan.fingerprint();
        self.engine.launch(plan);
        Ok(true)
    }

    /// The oldest step ends, well or badly; now and then two results arrive in the wrong order.
    fn land(&mut self, replica: ReplicaId) -> Result<(), String> {
        let many = self.engine.in_flight_of(replica) > 1;
        let swapped = many && self.rng.percent(self.swarm.swapped_results);
        let mut results = Vec::new();
        for _ in 0..=u32::from(swapped) {
            let fails = self.rng.percent(self.swarm.failures) || self.engine.must_fail(replica);
            let rows = self.engine.oldest_rows(replica);
            if fails {
                self.meet("failed step", &rows);
                let failed = self.engine.fail_oldest_of(replica);
                results.extend(failed.map(|step| (step, None)));
            } else {
                let ran = self.engine.run_oldest_of(replica);
                results.extend(ran.map(|(step, output)| (step, Some(output))));
            }
        }
        while let Some((step, output)) = results.pop() {
            self.report.events += 1;
            match output {
                Some(output) => {
                    self.log(Event::Landed(step.0));
                    if self.is_time(|p| matches!(p, Planted::LostResult(_))) {
                        continue;
                    }
                    self.core.complete(replica, step, &output, self.now);
                    if self.is_time(|p| matches!(p, Planted::DoubledResult(_))) {
                        self.core.complete(replica, step, &output, self.now);
                    }
                }
                None => {
                    self.log(Event::Failed(step.0));
                    self.core.fail_step(replica, step, self.now);
                }
            }
            self.hear()?;
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
        let mut asked = new.clone();
        if self.is_time(|p| matches!(p, Planted::ForeignSalt(_))) {
            let other = self.namespaces.iter().find(|&&ns| ns != new.ns);
            asked.ns = other.copied().unwrap_or(new.ns);
        }
        match self.core.add(asked, self.now) {
            Admission::Admitted(id) => {
                let prompt = u32::try_from(new.tokens.len()).unwrap_or(u32::MAX);
                self.log(Event::Added(id, prompt, new.max_tokens));
                self.engine.know(id, new.ns, &new.tokens);
                let client = Client {
                    new,
                    arrival: self.now,
                    pin_epoch: self.pin_epoch(),
                    got: Vec::new(),
                    started: None,
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
            let aborts = reason == FinishReason::Aborted;
            self.meet(if aborts { "abort" } else { "stop string" }, &[id]);
            let lost = aborts && !had && self.is_time(|p| matches!(p, Planted::LostAbort(_)));
            let end = if lost {
                true
            } else if aborts {
                self.core.abort(id, self.now)
            } else {
                self.core.finish(id, reason, self.now)
            };
            // A displaced request has ended, but its caller hears of it with the next events.
            let heard = self.report.ended.get("Displaced").copied().unwrap_or(0);
            let schedulers = self.core.stats().schedulers;
            let unheard = schedulers.iter().map(|s| s.displaced).sum::<u64>() > heard;
            if end == had && (end || !unheard) {
                return Err(format!("request {}: ended before: {had}, now: {end}", id.0));
            }
            self.hear()?;
            if end && self.clients[&id].reason != Some(reason) {
                return Err(format!("request {} was ended and did not hear of it", id.0));
            }
        }
        self.act();
        Ok(())
    }

    /// Counts a fault for each request that it meets, by the phase it is in.
    fn meet(&mut self, fault: &str, ids: &[RequestId]) {
        for &id in ids {
            let phase = self.core.phase(id).unwrap_or("ended");
            let pair = format!("{fault} / {phase}");
            *self.report.met.entry(pair).or_default() += 1;
        }
    }

    fn meet_all(&mut self, fault: &str) {
        let live = self.live.clone();
        self.meet(fault, &live);
    }

    /// Counts an occasion for the planted fault; true when its time has come.
    pub(crate) fn is_time(&mut self, kind: impl Fn(Planted) -> bool) -> bool {
        if !kind(self.planted) {
            return false;
        }
        self.occasions += 1;
        self.occasions == self.planted.occasion()
    }

    /// Somebody pins, releases or copies down a conversation, or wants everything flushed.
    fn act(&mut self) {
        if self.rng.percent(1) && self.core.flush(self.now).is_ok() {
            self.unpins += 1;
            self.promises.clear();
        }
        if !self.rng.percent(self.swarm.acts) || self.conversations.is_empty() {
            return;
        }
        let at = self
            .rng
            .below(u32::try_from(self.conversations.len()).unwrap_or(1)) as usize;
        let (ns, tokens) = self.conversations[at].clone();
        let target = Target::Prefix {
            ns,
            tokens: tokens.clone(),
        };
        let tenant = TenantId(self.rng.below(3));
        let seconds = u64::from(self.rng.below(self.swarm.pin_ttl_max + 1));
        let clamped = false;
        let ttl = Ttl { seconds, clamped };
        let action = match self.rng.below(4) {
            0 => Action::Release { target },
            1 => Action::Demote { target },
            _ => Action::Pin { target, ttl },
        };
        if matches!(action, Action::Release { .. }) {
            // Whose pins it ends is the cache's affair.
            self.unpins += 1;
            self.promises
                .retain(|p| p.ns != ns || p.tokens[0] != tokens[0]);
        }
        self.report.events += 1;
        let outcome = self.core.act(tenant, &action, self.now);
        if let (Action::Pin { .. }, Outcome::Accepted { pages } | Outcome::Clipped { pages, .. }) =
            (&action, outcome)
        {
            self.promise(ns, &tokens, pages, self.now, seconds);
        }
    }

    /// Changes whenever a pin may have ended before its time.
    pub(crate) fn pin_epoch(&self) -> (u64, u64) {
        (self.core.stats().cache.pins_yielded, self.unpins)
    }

    /// Watches that the first `pages` of `tokens` stay somewhere for `seconds` from `since` on.
    pub(crate) fn promise(
        &mut self,
        ns: NamespaceId,
        tokens: &[Token],
        pages: u32,
        since: Nanos,
        seconds: u64,
    ) {
        let end = (pages * self.swarm.scheduler.page_tokens) as usize;
        let until = since + seconds * 1_000_000_000;
        if pages == 0 || self.promises.len() >= PROMISES_MAX {
            return;
        }
        self.report.pins_watched += 1;
        let tokens = tokens[..end.min(tokens.len())].to_vec();
        if self.planted == Planted::LostPin(u32::try_from(self.report.pins_watched).unwrap_or(0)) {
            for tenant in 0..3 {
                let target = Target::Prefix {
                    ns,
                    tokens: tokens.clone(),
                };
                self.core
                    .act(TenantId(tenant), &Action::Release { target }, self.now);
            }
        }
        self.promises.push(Promise { ns, tokens, until });
    }

    /// What is pinned is found on the host or on one device, unless pins had to give way.
    fn check_promises(&mut self) -> Result<(), String> {
        let yielded = self.core.stats().cache.pins_yielded;
        if yielded != self.pins_yielded {
            self.pins_yielded = yielded;
            self.promises.clear();
        }
        let now = self.now;
        self.promises.retain(|promise| promise.until > now);
        for Promise { ns, tokens, until } in &self.promises {
            let key = Key { ns: *ns, tokens };
            let found = self.replicas().map(|replica| {
                let probe = self.core.probe(key, replica);
                (probe.device_tokens + probe.host_tokens) as usize
            });
            let most = found.max().unwrap_or(0);
            if most < tokens.len() {
                return Err(format!(
                    "{most} of {} pinned tokens are left, {} ns before the deadline: {:?}",
                    tokens.len(),
                    until - now,
                    self.core.stats().cache
                ));
            }
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), String> {
        self.report.checks += 1;
        self.core.check().map_err(|found| found.to_string())?;
        self.check_promises()?;
        let stats = self.core.stats();
        let stray: u64 = stats.schedulers.iter().map(|s| s.stray_results).sum();
        if stray > 0 {
            return Err(format!("{stray} results for steps that were not out"));
        }
        let stats = stats.cache;
        if stats.stray_releases > 0 || stats.copies_stray > 0 {
            return Err(format!(
                "{} pages released twice, {} copies acknowledged that were not out",
                stats.stray_releases, stats.copies_stray
            ));
        }
        Ok(())
    }

    /// The idle law: nothing is held, every page is free or cached.
    fn at_rest(&mut self) -> Result<(), String> {
        self.check()?;
        let stats = self.core.stats();
        for tier in &stats.cache.tiers {
            let busy = tier.leased + tier.held + tier.in_transit;
            if busy > 0 || tier.free + tier.evictable != tier.total {
                return Err(format!("at rest: {tier:?}"));
            }
        }
        if !self.core.is_idle() {
            return Err("at rest, but the core is not idle".to_owned());
        }
        self.report.take_in(self.step, &stats, &self.engine);
        self.core
            .flush(self.now)
            .map_err(|refused| format!("at rest: {refused:?}"))?;
        if self.core.stats().cache.pinned_pages > 0 {
            return Err("flushed, and pages are still pinned".to_owned());
        }
        Ok(())
    }

    pub(crate) fn log(&mut self, event: Event) {
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
