//! A small scripted world around the whole core: one engine double for all its replicas, and a turn
//! at a time. Everything is recounted after every turn.

use std::collections::BTreeMap;

use rootstock::{CoreConfig, Limits, RouterConfig, ServingCore};
use rootstock_memory::{CopyEngine, Nanos, ReplicaId};
use rootstock_radix::{CacheConfig, Key, NamespaceId, Token};
use rootstock_scheduler::{Admission, Emit, NewRequest, RequestId, SchedulerConfig};

use crate::double::EngineDouble;
use crate::planted::Planted;
use crate::sim::base_key;
use crate::text;
use crate::world::Heard;

/// The core and its double.
#[derive(Debug)]
pub struct Rig {
    /// Under test.
    pub core: ServingCore,
    /// Runs its plans.
    pub engine: EngineDouble,
    /// The clock.
    pub now: Nanos,
    /// The one namespace.
    pub ns: NamespaceId,
    asked: BTreeMap<RequestId, NewRequest>,
    heard: BTreeMap<RequestId, Heard>,
}

impl Rig {
    /// A core with empty tiers.
    ///
    /// # Panics
    /// When the configuration is not valid.
    pub fn new(cache: CacheConfig, scheduler: SchedulerConfig) -> Self {
        let page_tokens = cache.page_tokens;
        Self::of(
            CoreConfig {
                cache,
                scheduler: SchedulerConfig {
                    page_tokens,
                    ..scheduler
                },
                limits: Limits::default(),
                router: RouterConfig::default(),
            },
            3,
        )
    }

    /// The same, with copies that take up to `delay` turns.
    ///
    /// # Panics
    /// When the configuration is not valid.
    pub fn of(config: CoreConfig, delay: u32) -> Self {
        let page_tokens = config.cache.page_tokens;
        let mut core = ServingCore::new(config).expect("the test's configuration is valid");
        let ns = core.namespace(&base_key()).expect("one namespace");
        Self {
            core,
            engine: EngineDouble::new(page_tokens, delay, 1, Planted::Nothing),
            now: 1_000_000_000,
            ns,
            asked: BTreeMap::new(),
            heard: BTreeMap::new(),
        }
    }

    /// Adds a request that must be taken.
    ///
    /// # Panics
    /// When it is not.
    pub fn add(&mut self, new: NewRequest) -> RequestId {
        let answer = self.core.add(new.clone(), self.now);
        let Admission::Admitted(id) = answer else {
            unreachable!("it is taken: {answer:?}")
        };
        self.engine.know(id, new.ns, &new.tokens);
        self.asked.insert(id, new);
        self.heard.insert(id, Heard::default());
        id
    }

    /// One turn: acknowledgements, then one step of each replica. Whether anything moved.
    ///
    /// # Panics
    /// When something is wrong.
    pub fn turn(&mut self) -> bool {
        self.now += 1_000_000;
        let mut done = Vec::new();
        self.engine.poll(&mut done);
        let mut moved = !done.is_empty() || self.engine.copies_under_way() > 0;
        done.into_iter()
            .for_each(|copy| self.core.copy_done(copy, self.now));
        self.core.tick(self.now);
        let replicas = u16::try_from(self.core.config().replicas()).unwrap_or(1);
        for replica in (0..replicas).map(ReplicaId) {
            while let Some(plan) = self.core.schedule(replica, self.now) {
                self.engine.launch(plan);
            }
            if let Some((step, output)) = self.engine.run_oldest_of(replica) {
                self.core.complete(replica, step, &output, self.now);
                moved = true;
            }
        }
        self.hear();
        assert_eq!(self.core.check(), Ok(()));
        assert_eq!(self.engine.finding, None);
        moved
    }

    /// Turns until nothing is live and nothing is copied.
    ///
    /// # Panics
    /// When that takes more than 20,000 turns, or something is held then.
    pub fn run_dry(&mut self) {
        for _ in 0..20_000 {
            let moved = self.turn();
            if self.core.is_idle() && !moved {
                assert_eq!(self.core.check_idle(), Ok(()));
                assert_eq!(self.core.copies_under_way(), 0);
                return;
            }
        }
        unreachable!("still busy: {:?}", self.core.stats());
    }

    /// What was heard of a request.
    pub fn heard(&self, id: RequestId) -> &Heard {
        &self.heard[&id]
    }

    /// Whether a request has said everything it says alone.
    pub fn said_all(&self, id: RequestId) -> bool {
        let limit = self.core.config().scheduler.max_model_len;
        self.heard[&id].tokens == text::alone(&self.asked[&id], limit).0
    }

    /// Tokens of a prompt that a replica has on device and host.
    pub fn found(&self, tokens: &[Token], replica: u16) -> u32 {
        let key = Key {
            ns: self.ns,
            tokens,
        };
        let probe = self.core.probe(key, ReplicaId(replica));
        probe.device_tokens + probe.host_tokens
    }

    fn hear(&mut self) {
        let mut emits = Vec::new();
        self.core.drain_emits(&mut emits);
        for emit in emits {
            let heard = self.heard.entry(emit.request()).or_default();
            assert!(heard.last.is_none(), "after the final event: {emit:?}");
            match emit {
                Emit::Started { cached, .. } => {
                    heard.started = Some(cached.total());
                    heard.cached = cached;
                }
                Emit::Tokens { tokens, .. } => heard.tokens.extend(tokens),
                Emit::Final { reason, usage, .. } => heard.last = Some((reason, usage)),
            }
        }
    }
}
