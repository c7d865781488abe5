//! A random but repeatable load on a core, for the tests of the journal.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use rootstock::memory::{CopyDone, CopyId, Nanos, ReplicaId, StepId};
use rootstock::radix::{CacheConfig, Hints, NamespaceId, NamespaceKey, Token};
use rootstock::scheduler::{
    Admission, Emit, FinishReason, NewRequest, RequestId, RowOut, SamplingParams, SchedulerConfig,
    StepOutput, StepPlan,
};
use rootstock::{CoreConfig, Limits, RouterConfig, ServingCore};

/// Pages of four tokens, two replicas, two steps in flight, a queue that fills.
pub(crate) fn config() -> CoreConfig {
    let page_tokens = 4;
    let cache = CacheConfig {
        page_tokens,
        device_pages: vec![24, 40],
        max_nodes: 4096,
        ..CacheConfig::default()
    };
    let scheduler = SchedulerConfig {
        page_tokens,
        max_running: 5,
        max_queue: 12,
        step_tokens: 24,
        max_model_len: 80,
        max_in_flight: 2,
        ..SchedulerConfig::default()
    };
    CoreConfig {
        cache,
        scheduler,
        limits: Limits::default(),
        router: RouterConfig::default(),
    }
}

/// Steele's SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// A sink whose bytes the test can read.
#[derive(Clone, Default)]
pub(crate) struct Sink(Arc<Mutex<Vec<u8>>>);

impl Sink {
    pub(crate) fn bytes(&self) -> Vec<u8> {
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

/// What a load did.
#[derive(Default)]
pub(crate) struct Outcome {
    pub(crate) plans: u64,
    pub(crate) admitted: u64,
    pub(crate) finals: u64,
}

/// Drives `core` for `rounds` rounds; every kind of input occurs.
pub(crate) fn drive(core: &mut ServingCore, seed: u64, rounds: u32) -> Outcome {
    let mut load = Load::new(core, seed);
    for _ in 0..rounds {
        load.round(core);
    }
    load.drain(core);
    load.outcome
}

struct Load {
    random: Random,
    now: Nanos,
    spaces: Vec<NamespaceId>,
    live: Vec<RequestId>,
    out: Vec<VecDeque<(StepId, StepOutput)>>,
    outcome: Outcome,
}

impl Load {
    fn new(core: &mut ServingCore, seed: u64) -> Self {
        let spaces = ["", "salt"].map(|salt| {
            let key = NamespaceKey {
                model: "m".to_owned(),
                numerics: "n".to_owned(),
                lora: None,
                salt: (!salt.is_empty()).then(|| salt.to_owned()),
            };
            core.namespace(&key).expect("two namespaces fit")
        });
        let replicas = core.config().replicas();
        Self {
            random: Random(seed),
            now: 1,
            spaces: spaces.to_vec(),
            live: Vec::new(),
            out: vec![VecDeque::new(); replicas],
            outcome: Outcome::default(),
        }
    }

    fn round(&mut self, core: &mut ServingCore) {
        self.now += self.random.below(40_000_000);
        if self.random.chance(35) {
            let request = self.request();
            if let Admission::Admitted(id) = core.add(request, self.now) {
                self.outcome.admitted += 1;
                self.live.push(id);
            }
        }
        if self.random.chance(4) && !self.live.is_empty() {
            let id = self.live[self.random.below(self.live.len() as u64) as usize];
            if self.random.chance(50) {
                core.abort(id, self.now);
            } else {
                core.finish(id, FinishReason::StopString, self.now);
            }
        }
        for replica in 0..self.out.len() {
            self.step(core, replica);
        }
        if self.random.chance(2) {
            core.tick(self.now);
            core.copy_done(
                CopyDone {
                    id: CopyId(7),
                    ok: false,
                },
                self.now,
            );
            _ = core.flush(self.now);
        }
        self.hear(core);
    }

    fn step(&mut self, core: &mut ServingCore, replica: usize) {
        let id = ReplicaId(replica as u16);
        if let Some(plan) = core.schedule(id, self.now) {
            self.outcome.plans += 1;
            let output = self.output(&plan);
            self.out[replica].push_back((plan.id, output));
        }
        let busy = self.out[replica].len() as u64;
        if busy > self.random.below(2)
            && let Some((step, output)) = self.out[replica].pop_front()
        {
            if self.random.chance(2) {
                core.fail_step(id, step, self.now);
            } else {
                core.complete(id, step, &output, self.now);
            }
        }
    }

    fn request(&mut self) -> NewRequest {
        let shared = self.random.below(3) as Token;
        let (head, tail) = (self.random.below(30), 1 + self.random.below(30));
        let mut tokens: Vec<Token> = (0..head as Token).map(|i| shared * 100 + i).collect();
        tokens.extend((0..tail).map(|_| 500 + self.random.below(2) as Token));
        let sampling = if self.random.chance(50) {
            SamplingParams::greedy()
        } else {
            SamplingParams {
                repetition_penalty: 1.1,
                ..SamplingParams::default()
            }
        };
        NewRequest {
            min_tokens: 2,
            stop_tokens: vec![999],
            sampling,
            hints: Hints {
                priority: self.random.below(4) as i32,
                ..Hints::default()
            },
            label: self.random.below(9),
            ..NewRequest::new(
                self.spaces[self.random.below(2) as usize],
                tokens,
                1 + self.random.below(16) as u32,
            )
        }
    }

    fn output(&mut self, plan: &StepPlan) -> StepOutput {
        let rows = plan.rows.iter().map(|row| {
            let mut out = RowOut::default();
            if row.sample.is_some() {
                let end = row.sample.as_ref().is_some_and(|s| s.output_index > 2);
                let stop = end && self.random.chance(5);
                out.accepted.push(if stop {
                    999
                } else {
                    self.random.below(900) as Token
                });
            }
            out
        });
        StepOutput {
            rows: rows.collect(),
        }
    }

    fn hear(&mut self, core: &mut ServingCore) {
        let mut emits = Vec::new();
        core.drain_emits(&mut emits);
        for emit in emits {
            if let Emit::Final { request, .. } = emit {
                self.outcome.finals += 1;
                self.live.retain(|id| *id != request);
            }
        }
    }

    /// Runs until every request has had its final event.
    fn drain(&mut self, core: &mut ServingCore) {
        for _ in 0..100_000 {
            if self.live.is_empty() && self.out.iter().all(VecDeque::is_empty) {
                return;
            }
            self.now += 1_000_000;
            for replica in 0..self.out.len() {
                self.step(core, replica);
            }
            self.hear(core);
        }
        assert!(
            self.live.is_empty(),
            "{} requests without a final event",
            self.live.len()
        );
    }
}
