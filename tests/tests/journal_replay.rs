//! A mixed load on the whole core, host tier, copies and pins included, run by the engine double,
//! is recorded and replayed: every plan is equal, and an input changed afterwards is found.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use rootstock::journal::{
    Entry, Journal, JournalLimits, JournalReader, ReplayEnd, ReplayReport, replay,
};
use rootstock::{CoreConfig, Limits, RouterConfig, ServingCore};
use rootstock_memory::{CopyEngine, Nanos, ReplicaId};
use rootstock_radix::{
    Action, CacheConfig, Hints, NamespaceId, NamespaceKey, PolicyKind, Target, TenantId, Token, Ttl,
};
use rootstock_scheduler::{
    Admission, Emit, FinishReason, NewRequest, RequestId, SamplingParams, SchedulerConfig,
};
use rootstock_tests::double::EngineDouble;
use rootstock_tests::planted::Planted;
use rootstock_tests::rng::Rng;
use rootstock_tests::swarm::Swarm;
use rootstock_tests::text::VOCAB;

const SECOND: Nanos = 1_000_000_000;

/// A sink whose bytes the test can read.
#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Sink {
    fn bytes(&self) -> Vec<u8> {
        self.0.lock().expect("no panic while writing").clone()
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0
            .lock()
            .expect("no panic while writing")
            .extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Agents that take turns on growing conversations, aborts, stop strings, failed steps.
struct Load {
    core: ServingCore,
    double: EngineDouble,
    rng: Rng,
    now: Nanos,
    spaces: Vec<NamespaceId>,
    live: Vec<(RequestId, NamespaceId, Vec<Token>)>,
    /// Histories that a next turn continues.
    histories: Vec<(NamespaceId, Vec<Token>)>,
    finals: u64,
    admitted: u64,
    preemptions: u64,
    cached: u64,
}

impl Load {
    fn new(config: CoreConfig, seed: u64, journal: Sink) -> Self {
        let mut core = ServingCore::new(config).expect("a sound configuration");
        let limits = JournalLimits { max_bytes: 1 << 28 };
        let journal = Journal::new(Box::new(journal), core.config(), limits).expect("a journal");
        core.set_journal(Some(journal));
        let spaces = ["a", "b"].map(|salt| {
            let salt = Some(salt.to_owned());
            let key = NamespaceKey {
                model: "m".to_owned(),
                salt,
                ..NamespaceKey::default()
            };
            core.namespace(&key).expect("two namespaces")
        });
        let page_tokens = core.config().cache.page_tokens;
        let mut double = EngineDouble::new(page_tokens, 20, seed, Planted::Nothing);
        double.copy_failures = 5;
        Self {
            core,
            double,
            rng: Rng::new(seed),
            now: 1,
            spaces: spaces.to_vec(),
            live: Vec::new(),
            histories: Vec::new(),
            finals: 0,
            admitted: 0,
            preemptions: 0,
            cached: 0,
        }
    }

    /// Traffic until `end`, then dry.
    fn run(&mut self, end: Nanos, arrivals_percent: u32) {
        while self.now < end {
            if self.rng.percent(arrivals_percent) {
                self.arrive();
            }
            if self.rng.percent(1) && !self.live.is_empty() {
                let id = self.rng.pick(&self.live).0;
                if self.rng.percent(50) {
                    self.core.abort(id, self.now);
                } else {
                    self.core.finish(id, FinishReason::StopString, self.now);
                }
            }
            if self.rng.percent(1) {
                self.core.tick(self.now);
            }
            if self.rng.percent(2) && !self.histories.is_empty() {
                self.act();
            }
            self.step();
        }
        for _ in 0..200_000 {
            let copies = self.core.copies_under_way();
            if self.core.is_idle() && self.double.in_flight() == 0 && copies == 0 {
                break;
            }
            self.step();
        }
        assert!(
            self.live.is_empty(),
            "{} requests never ended",
            self.live.len()
        );
        assert_eq!(self.finals, self.admitted);
        assert_eq!(self.double.finding, None);
        self.core.check_idle().expect("nothing in use");
    }

    fn arrive(&mut self) {
        let fresh = self.rng.between(1, 40);
        let fresh: Vec<Token> = (0..fresh).map(|_| self.rng.below(VOCAB)).collect();
        let continued = self.rng.percent(70) && !self.histories.is_empty();
        let (ns, mut tokens) = if continued {
            self.rng.pick(&self.histories).clone()
        } else {
            (*self.rng.pick(&self.spaces), (0..24).collect())
        };
        tokens.extend(fresh);
        let sampled = self.rng.percent(40);
        let sampling = if sampled {
            SamplingParams {
                seed: self.rng.next_u64(),
                ..SamplingParams::default()
            }
        } else {
            SamplingParams::greedy()
        };
        let priority = i32::try_from(self.rng.below(4)).expect("small");
        let new = NewRequest {
            stop_tokens: vec![3],
            sampling,
            hints: Hints {
                priority,
                jump_s: f64::from(priority),
                pins: self.pins(),
                ..Hints::default()
            },
            label: u64::from(self.rng.below(3)),
            ..NewRequest::new(ns, tokens.clone(), self.rng.between(1, 24))
        };
        if let Admission::Admitted(id) = self.core.add(new, self.now) {
            self.admitted += 1;
            self.double.know(id, ns, &tokens);
            self.live.push((id, ns, tokens));
        }
    }

    fn pins(&mut self) -> Vec<(u32, Ttl)> {
        let seconds = u64::from(self.rng.below(300));
        let clamped = false;
        let ttl = Ttl { seconds, clamped };
        let some = self.rng.percent(10);
        some.then_some((u32::MAX, ttl)).into_iter().collect()
    }

    fn step(&mut self) {
        self.now += 1 + u64::from(self.rng.below(60_000_000));
        let mut done = Vec::new();
        self.double.poll(&mut done);
        for copy in done {
            self.core.copy_done(copy, self.now);
        }
        let replicas = u16::try_from(self.core.config().replicas()).expect("few");
        for replica in (0..replicas).map(ReplicaId) {
            self.step_of(replica);
        }
        let mut emits = Vec::new();
        self.core.drain_emits(&mut emits);
        for emit in emits {
            self.hear(emit);
        }
    }

    fn step_of(&mut self, replica: ReplicaId) {
        let plan = self.core.schedule(replica, self.now);
        let launched = plan.is_some();
        if let Some(plan) = plan {
            self.double.launch(plan);
        }
        if launched && !self.rng.percent(60) {
            return;
        }
        if self.rng.below(500) == 0 {
            if let Some(step) = self.double.fail_oldest_of(replica) {
                self.core.fail_step(replica, step, self.now);
            }
        } else if let Some((step, output)) = self.double.run_oldest_of(replica) {
            self.core.complete(replica, step, &output, self.now);
        }
    }

    /// Somebody pins a history, or copies it down.
    fn act(&mut self) {
        let (ns, tokens) = self.rng.pick(&self.histories).clone();
        let target = Target::Prefix { ns, tokens };
        let action = if self.rng.percent(70) {
            let seconds = u64::from(self.rng.below(120));
            let clamped = false;
            let ttl = Ttl { seconds, clamped };
            Action::Pin { target, ttl }
        } else {
            Action::Demote { target }
        };
        self.core.act(TenantId(0), &action, self.now);
    }

    fn hear(&mut self, emit: Emit) {
        let Some(at) = self.live.iter().position(|(id, ..)| *id == emit.request()) else {
            unreachable!("an event of a request that is not live");
        };
        match emit {
            Emit::Started { cached, .. } => self.cached += u64::from(cached.total()),
            Emit::Tokens { tokens, .. } => self.live[at].2.extend(tokens),
            Emit::Final { usage, .. } => {
                let (_, ns, tokens) = self.live.swap_remove(at);
                self.finals += 1;
                self.preemptions += u64::from(usage.preemptions);
                if tokens.len() < 400 {
                    self.histories.push((ns, tokens));
                }
                if self.histories.len() > 40 {
                    self.histories.remove(0);
                }
            }
        }
    }
}

fn exact(bytes: &[u8]) -> ReplayReport {
    let report = replay(bytes).expect("a sound journal");
    assert!(report.is_exact(), "{:?}", report.first_mismatch);
    assert_eq!(report.end, ReplayEnd::Closed);
    report
}

fn pressed() -> CoreConfig {
    let cache = CacheConfig {
        device_pages: vec![96],
        host_pages: 160,
        policy: PolicyKind::Priority,
        max_nodes: 1 << 14,
        ..CacheConfig::default()
    };
    let scheduler = SchedulerConfig {
        max_running: 12,
        max_queue: 32,
        step_tokens: 128,
        max_model_len: 600,
        max_in_flight: 2,
        max_drafts: 2,
        ..SchedulerConfig::default()
    };
    CoreConfig {
        cache,
        scheduler,
        limits: Limits::default(),
        router: RouterConfig::default(),
    }
}

/// Records ten minutes (of the virtual clock) of load; returns the journal.
fn ten_minutes(seed: u64) -> (Vec<u8>, u64) {
    let sink = Sink::default();
    let mut load = Load::new(pressed(), seed, sink.clone());
    load.run(600 * SECOND, 60);
    assert!(
        load.preemptions > 20,
        "{} preemptions: the pool is too large",
        load.preemptions
    );
    assert!(load.cached > 10_000, "{} cached tokens", load.cached);
    let stats = load.core.stats();
    let scheduler = &stats.schedulers[0];
    assert!(
        scheduler.fetched_tokens > 1_000 && scheduler.fetches_failed > 0,
        "{scheduler:?}"
    );
    assert!(scheduler.pins_asked > 100 && stats.cache.pinned_pages > 0);
    let admitted = load.admitted;
    drop(load);
    (sink.bytes(), admitted)
}

#[test]
fn ten_minutes_of_mixed_load_replay_plan_for_plan() {
    let (bytes, admitted) = ten_minutes(1);
    let report = exact(&bytes);
    assert!(
        report.plans > 10_000 && admitted > 3_000,
        "{admitted} requests, {report:?}"
    );
    println!("{} bytes, {admitted} requests, {report:?}", bytes.len());
}

#[test]
fn worlds_of_the_swarm_replay_plan_for_plan() {
    for seed in 0..40 {
        let world = Swarm::of(seed);
        let mut cache = world.cache.clone();
        cache.max_nodes = cache.max_nodes.min(1 << 14);
        let config = CoreConfig {
            cache,
            scheduler: world.scheduler,
            limits: Limits::default(),
            router: RouterConfig::default(),
        };
        let sink = Sink::default();
        let mut load = Load::new(config, seed, sink.clone());
        load.run(4 * SECOND, 50);
        drop(load);
        exact(&sink.bytes());
    }
}

/// Writes a journal again, with each entry changed by `change`.
fn rewrite(bytes: &[u8], mut change: impl FnMut(Entry<'static>) -> Entry<'static>) -> Vec<u8> {
    let mut reader = JournalReader::open(bytes).expect("a sound journal");
    let sink = Sink::default();
    let limits = JournalLimits { max_bytes: 1 << 28 };
    let config = reader.config().clone();
    let mut journal = Journal::new(Box::new(sink.clone()), &config, limits).expect("a journal");
    while let Ok(entry) = reader.next_entry().expect("a sound journal") {
        journal.record(&change(entry));
    }
    drop(journal);
    sink.bytes()
}

#[test]
fn one_token_flipped_in_one_output_is_found() {
    let sink = Sink::default();
    let mut load = Load::new(pressed(), 5, sink.clone());
    load.run(20 * SECOND, 60);
    drop(load);
    let bytes = sink.bytes();
    exact(&bytes);
    let mut outputs = 0;
    let mut flip = |entry| {
        let Entry::Complete(replica, step, mut output, now) = entry else {
            return entry;
        };
        outputs += 1;
        // The first output from the hundredth on that has a token followed by others.
        if outputs >= 100 {
            let row = output
                .to_mut()
                .rows
                .iter_mut()
                .find(|row| !row.accepted.is_empty());
            if let Some(row) = row {
                row.accepted[0] ^= 64;
                outputs = i64::MIN;
            }
        }
        Entry::Complete(replica, step, output, now)
    };
    let changed = rewrite(&bytes, &mut flip);
    let report = replay(&changed[..]).expect("a well-formed journal");
    let first = report.first_mismatch.expect("the flip is found");
    assert_ne!(first.recorded, first.replayed);
    assert!(
        first.recorded.to_string().contains("step "),
        "{}",
        first.recorded
    );
}
