//! A small scripted world for scenario tests: one scheduler, one cache, one engine double, and a
//! step at a time. Everything is recounted after every step.

use std::collections::BTreeMap;

use rootstock_memory::{CopyEngine, Nanos, StepId, TierId};
use rootstock_radix::{CacheConfig, NamespaceId, PolicyKind, PrefixCache, Token};
use rootstock_scheduler::{
    Admission, CachedTokens, Emit, FinishReason, NewRequest, RequestId, Scheduler, SchedulerConfig,
    Usage,
};

use crate::double::EngineDouble;
use crate::planted::Planted;
use crate::sim::base_key;
use crate::text;

/// A second of the virtual clock.
pub const SECOND: Nanos = 1_000_000_000;

/// What a caller has heard of a request.
#[derive(Clone, Debug, Default)]
pub struct Heard {
    /// Prompt tokens that were cached at the start; None: not started.
    pub started: Option<u32>,
    /// The same by tier.
    pub cached: CachedTokens,
    /// Output.
    pub tokens: Vec<Token>,
    /// The end.
    pub last: Option<(FinishReason, Usage)>,
}

/// Rows of a launched step: (request, first position, positions).
pub type Rows = Vec<(RequestId, u32, u32)>;

/// The world.
#[derive(Debug)]
pub struct World {
    /// Scheduler under test.
    pub scheduler: Scheduler,
    /// Its cache.
    pub cache: PrefixCache,
    /// Its backend.
    pub engine: EngineDouble,
    /// The clock; tests move it.
    pub now: Nanos,
    /// Nanoseconds of a step.
    pub step_ns: Nanos,
    /// The one namespace.
    pub ns: NamespaceId,
    asked: BTreeMap<RequestId, NewRequest>,
    heard: BTreeMap<RequestId, Heard>,
}

/// A request of the scenario tests: greedy, runs to its maximum.
pub fn request(ns: NamespaceId, prompt: &[Token], max_tokens: u32) -> NewRequest {
    NewRequest::new(ns, prompt.to_vec(), max_tokens)
}

/// `len` tokens that differ for each `salt`.
pub fn prompt(salt: u32, len: u32) -> Vec<Token> {
    (0..len).map(|at| 1000 + salt * 10_000 + at).collect()
}

impl World {
    /// A world of `pages` pages; the page size is that of `config`.
    ///
    /// # Panics
    /// When the configuration is not valid.
    pub fn new(pages: u32, config: SchedulerConfig) -> Self {
        let cache_config = CacheConfig {
            page_tokens: config.page_tokens,
            device_pages: vec![pages],
            policy: PolicyKind::Lru,
            ..CacheConfig::default()
        };
        Self::of(&cache_config, config)
    }

    /// A world with tiers as configured.
    ///
    /// # Panics
    /// When the configuration is not valid.
    pub fn of(cache_config: &CacheConfig, config: SchedulerConfig) -> Self {
        let mut cache = PrefixCache::new(cache_config).expect("the test's configuration is valid");
        let ns = cache.namespace(&base_key()).expect("one namespace");
        Self {
            engine: EngineDouble::new(config.page_tokens, 0, 1, Planted::Nothing),
            scheduler: Scheduler::new(config).expect("the test's configuration is valid"),
            cache,
            now: 1_000 * SECOND,
            step_ns: 1_000_000,
            ns,
            asked: BTreeMap::new(),
            heard: BTreeMap::new(),
        }
    }

    /// Adds a request and returns the answer.
    pub fn try_add(&mut self, new: NewRequest) -> Admission {
        let answer = self.scheduler.add(new.clone(), &self.cache, self.now);
        if let Admission::Admitted(id) = &answer {
            self.engine.know(*id, new.ns, &new.tokens);
            self.asked.insert(*id, new);
            self.heard.insert(*id, Heard::default());
        }
        answer
    }

    /// Adds a request that must be taken.
    ///
    /// # Panics
    /// When it is not.
    pub fn add(&mut self, new: NewRequest) -> RequestId {
        let Admission::Admitted(id) = self.try_add(new) else {
            unreachable!("it is taken")
        };
        id
    }

    /// Adds a plain request with a priority.
    pub fn submit(&mut self, prompt: &[Token], max_tokens: u32, priority: i32) -> RequestId {
        let mut new = request(self.ns, prompt, max_tokens);
        new.hints.priority = priority;
        self.add(new)
    }

    /// Launches one step if there is one; its rows.
    pub fn launch(&mut self) -> Option<Rows> {
        let mut out = Vec::new();
        let plan = self.scheduler.schedule(&mut self.cache, self.now, &mut out);
        self.hear(out);
        let plan = plan?;
        let rows = plan
            .rows
            .iter()
            .map(|row| (row.request, row.first_pos, row.len))
            .collect();
        self.engine.launch(plan);
        self.check();
        Some(rows)
    }

    /// The oldest step ends.
    pub fn land(&mut self) -> Option<StepId> {
        let (step, output) = self.engine.run_oldest()?;
        self.now += self.step_ns;
        let mut out = Vec::new();
        self.scheduler
            .complete(&mut self.cache, step, &output, self.now, &mut out);
        self.hear(out);
        self.check();
        Some(step)
    }

    /// The oldest step fails.
    pub fn fail(&mut self) -> Option<StepId> {
        let step = self.engine.fail_oldest()?;
        let mut out = Vec::new();
        self.scheduler
            .fail_step(&mut self.cache, step, self.now, &mut out);
        self.hear(out);
        self.check();
        Some(step)
    }

    /// Copies whose time has come are acknowledged.
    pub fn acknowledge(&mut self) {
        let mut done = Vec::new();
        self.engine.poll(&mut done);
        for copy in done {
            self.cache.copy_done(copy, self.now);
        }
        self.check();
    }

    /// Acknowledges copies, launches what can be launched, then lands one step; the rows of what
    /// was launched.
    pub fn step(&mut self) -> Rows {
        self.acknowledge();
        let mut rows = Vec::new();
        while let Some(more) = self.launch() {
            rows.extend(more);
        }
        self.land();
        rows
    }

    /// Steps until nothing is live.
    ///
    /// # Panics
    /// When that takes more than 10,000 steps.
    pub fn run_dry(&mut self) {
        for _ in 0..10_000 {
            let copies = self.cache.stats().copies_under_way;
            if self.scheduler.is_idle() && self.engine.in_flight() == 0 && copies == 0 {
                self.at_rest();
                return;
            }
            self.step();
        }
        unreachable!(
            "still busy after 10,000 steps: {:?}",
            self.scheduler.stats()
        );
    }

    /// Steps until a request has said `n` tokens.
    ///
    /// # Panics
    /// When that takes more than 1,000 steps.
    pub fn until_said(&mut self, id: RequestId, n: usize) {
        for _ in 0..1_000 {
            if self.heard[&id].tokens.len() >= n {
                return;
            }
            self.step();
        }
        unreachable!("request {} has not said {n} tokens", id.0);
    }

    /// The caller gives up; whether that was the end.
    pub fn abort(&mut self, id: RequestId) -> bool {
        let end = self.scheduler.abort(&mut self.cache, id, self.now);
        let ended = end.is_some();
        self.hear(end.into_iter().collect());
        self.check();
        ended
    }

    /// What was heard of a request.
    pub fn heard(&self, id: RequestId) -> &Heard {
        &self.heard[&id]
    }

    /// How a request ended.
    ///
    /// # Panics
    /// When it has not.
    pub fn reason(&self, id: RequestId) -> FinishReason {
        self.heard[&id].last.expect("the request has ended").0
    }

    /// What an ended request used.
    ///
    /// # Panics
    /// When it has not ended.
    pub fn usage(&self, id: RequestId) -> Usage {
        self.heard[&id].last.expect("the request has ended").1
    }

    /// What a request says alone.
    pub fn alone(&self, id: RequestId) -> Vec<Token> {
        text::alone(&self.asked[&id], self.scheduler.config().max_model_len).0
    }

    /// Whether a request has said everything it says alone.
    pub fn said_all(&self, id: RequestId) -> bool {
        self.heard[&id].tokens == self.alone(id)
    }

    /// Whether a request has ended.
    pub fn ended(&self, id: RequestId) -> bool {
        self.heard[&id].last.is_some()
    }

    /// Free and evictable pages.
    pub fn available(&self) -> u32 {
        self.cache
            .available(TierId::Device(self.scheduler.config().replica))
    }

    /// Cached tokens of a prompt.
    pub fn cached(&self, tokens: &[Token]) -> u32 {
        let key = rootstock_radix::Key {
            ns: self.ns,
            tokens,
        };
        self.cache
            .probe(key, self.scheduler.config().replica)
            .device_tokens
    }

    /// Recounts everything.
    ///
    /// # Panics
    /// When something is wrong.
    pub fn check(&mut self) {
        assert_eq!(self.scheduler.check(&self.cache), Ok(()));
        assert_eq!(self.cache.check(), Ok(()));
        assert_eq!(self.engine.finding, None);
        assert_eq!(self.cache.stats().stray_releases, 0);
    }

    /// Nothing is held, every page is free or cached.
    ///
    /// # Panics
    /// When that is not so.
    pub fn at_rest(&mut self) {
        for tier in &self.cache.stats().tiers {
            assert_eq!(tier.leased + tier.held + tier.in_transit, 0, "{tier:?}");
            assert_eq!(tier.free + tier.evictable, tier.total, "{tier:?}");
        }
    }

    fn hear(&mut self, events: Vec<Emit>) {
        for emit in events {
            let id = emit.request();
            let heard = self
                .heard
                .get_mut(&id)
                .expect("an event of a known request");
            assert!(heard.last.is_none(), "after the final event: {emit:?}");
            match emit {
                Emit::Started { cached, .. } => {
                    assert_eq!(heard.started, None, "started twice");
                    heard.started = Some(cached.total());
                    heard.cached = cached;
                }
                Emit::Tokens { tokens, .. } => heard.tokens.extend(tokens),
                Emit::Final { reason, usage, .. } => heard.last = Some((reason, usage)),
            }
            let (got, alone) = (self.heard[&id].tokens.clone(), self.alone(id));
            assert!(
                alone.starts_with(&got),
                "request {}: {got:?}, alone {alone:?}",
                id.0
            );
        }
    }
}
