//! What do plans cost: copies between tiers, the order of each policy, and a whole step's schedule?
//!
//! `cargo bench -p rootstock-benches --bench plans -- FILTER`; as a test, each bench runs once on a
//! small tree. Leaves of 64 tokens under parents of 64, pages of 16, as in `radix.rs`. Inputs are
//! functions of fixed seeds, times are processor time of the thread.
//!
//! | bench | the decision it serves |
//! |---|---|
//! | `demote` | whether making room may plan copies on the way of every step |
//! | `promote` | the same for what a match found on host |
//! | `policy` | what a policy's order costs a request: match, lease, end |
//! | `schedule` | how many requests a core thread serves: one step with running and waiting ones |
#![expect(clippy::unwrap_used, reason = "a bench stops at the first error")]

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use rootstock::memory::{CopyDone, CopyPlan, ReplicaId};
use rootstock::radix::{CacheConfig, NamespaceKey, PolicyKind, WritePolicy};
use rootstock::scheduler::{NewRequest, RowOut, SchedulerConfig, StepOutput};
use rootstock::{CoreConfig, Limits, RouterConfig, ServingCore};
use rootstock_benches::drive::{Bench, DEVICE, REPLICA, now, since};
use rootstock_benches::micro::{LEAF_TOKENS, key, nodes};
use rootstock_benches::python_random::PythonRandom;
use rootstock_benches::workload::{Request, Span};
use rootstock_radix::Key;

const PAGE_TOKENS: u32 = 16;
const LEAF_PAGES: u32 = LEAF_TOKENS / PAGE_TOKENS;
/// Time between two operations: what ages has to move.
const STEP_NS: u64 = 1_000_000;

/// False when the benches run as tests.
fn measuring() -> bool {
    std::env::args().any(|arg| arg == "--bench")
}

fn sizes() -> &'static [u32] {
    if measuring() {
        &[1_000, 10_000, 100_000, 1_000_000]
    } else {
        &[100]
    }
}

fn stream(stream: u64, len: u32) -> Vec<u32> {
    let mut tokens = Vec::new();
    let span = Span {
        stream,
        start: 0,
        len,
    };
    Request::new(vec![span], 0).tokens(&mut tokens);
    tokens
}

/// A full device of `leaves` leaves over a host tier of the same size.
fn tiers(leaves: u32) -> Bench {
    let pages = nodes(leaves) * LEAF_PAGES;
    let config = CacheConfig {
        page_tokens: PAGE_TOKENS,
        device_pages: vec![pages],
        host_pages: pages,
        write_policy: WritePolicy::Back,
        policy: PolicyKind::Lru,
        max_nodes: 2 * pages + 16,
        ..CacheConfig::default()
    };
    let mut bench = Bench::with(&config).unwrap();
    for leaf in 0..leaves {
        bench.now += STEP_NS;
        assert!(bench.insert(&key(leaf)));
    }
    bench
}

fn done(bench: &mut Bench, copies: &[CopyPlan]) {
    for plan in copies {
        let (id, ok) = (plan.id, true);
        bench.cache.copy_done(CopyDone { id, ok }, bench.now);
    }
}

/// Makes room for a leaf; the time of planning what is copied down for it.
fn demote_one(bench: &mut Bench) -> Duration {
    bench.now += STEP_NS;
    let free = bench.cache.stats().tiers[0].free;
    let begin = now();
    let room = bench.cache.make_room(DEVICE, free + LEAF_PAGES, bench.now);
    let spent = since(begin);
    let mut copies = match room {
        Ok(room) => room.copies,
        Err(short) => {
            assert!(short.in_transit_pages > 0, "{short:?}");
            Vec::new()
        }
    };
    bench.cache.drain_copies(&mut copies);
    done(bench, &copies);
    spent
}

fn demote(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("demote");
    group.sample_size(10);
    for &leaves in sizes() {
        let mut bench = tiers(leaves);
        let mut next = leaves;
        group.bench_function(BenchmarkId::from_parameter(leaves), |bencher| {
            bencher.iter_custom(|iters| {
                let mut spent = Duration::ZERO;
                for _ in 0..iters {
                    spent += demote_one(&mut bench);
                    // The room is used, so that the next one is needed.
                    bench.now += STEP_NS;
                    while bench.cache.stats().tiers[0].free >= 2 * LEAF_PAGES {
                        assert!(bench.insert(&key(next)));
                        next += 1;
                    }
                }
                spent
            });
        });
    }
}

fn promote(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("promote");
    group.sample_size(10);
    for &leaves in sizes() {
        let mut bench = tiers(leaves);
        // A quarter of the leaves goes to host; which ones come back is known by their order.
        for _ in 0..leaves / 4 {
            demote_one(&mut bench);
        }
        let mut leaf = 0;
        group.bench_function(BenchmarkId::from_parameter(leaves), |bencher| {
            bencher.iter_custom(|iters| {
                let mut spent = Duration::ZERO;
                for _ in 0..iters {
                    spent += promote_one(&mut bench, &key(leaf));
                    leaf = (leaf + 1) % (leaves / 4);
                }
                spent
            });
        });
    }
}

/// Brings a key up where host has more of it; the time of planning that.
fn promote_one(bench: &mut Bench, tokens: &[u32]) -> Duration {
    bench.now += STEP_NS;
    while bench.cache.stats().tiers[0].free < 4 * LEAF_PAGES {
        demote_one(bench);
    }
    let ns = bench.ns;
    let found = bench
        .cache
        .match_lease(Key { ns, tokens }, REPLICA, u32::MAX, bench.now);
    let mut lease = found.lease;
    let pages = found.host_tokens / PAGE_TOKENS;
    let (mut reservation, _) = bench.cache.reserve(DEVICE, pages, bench.now).unwrap();
    let begin = now();
    let plan = bench.cache.promote(&mut lease, &mut reservation, bench.now);
    let spent = since(begin);
    bench.cache.cancel(reservation);
    done(bench, plan.as_slice());
    bench.end(lease);
    spent
}

fn policy(criterion: &mut Criterion) {
    let policies = [
        PolicyKind::Lru,
        PolicyKind::Priority,
        PolicyKind::Lfu,
        PolicyKind::Fifo,
        PolicyKind::Filo,
        PolicyKind::Mru,
        PolicyKind::Slru,
        PolicyKind::Agent,
    ];
    let leaves = if measuring() { 10_000 } else { 100 };
    let mut group = criterion.benchmark_group("policy");
    for policy in policies {
        let pages = nodes(leaves) * LEAF_PAGES;
        let mut bench = Bench::new(PAGE_TOKENS, pages, policy).unwrap();
        for leaf in 0..leaves {
            bench.now += STEP_NS;
            assert!(bench.insert(&key(leaf)));
        }
        let keys: Vec<Vec<u32>> = (0..leaves).map(key).collect();
        let mut rng = PythonRandom::new(1);
        group.bench_function(format!("{policy:?}").to_lowercase(), |bencher| {
            bencher.iter_custom(|iters| {
                let chosen: Vec<u32> = (0..iters).map(|_| rng.randint(0, leaves - 1)).collect();
                let begin = now();
                for leaf in chosen {
                    bench.now += STEP_NS;
                    let (lease, _) = bench.begin(&keys[leaf as usize]);
                    bench.end(lease);
                }
                since(begin)
            });
        });
    }
}

/// A core with `running` requests that decode and `waiting` ones that find no seat.
fn core(running: u32, waiting: u32) -> ServingCore {
    let mut core = ServingCore::new(CoreConfig {
        cache: CacheConfig {
            page_tokens: PAGE_TOKENS,
            device_pages: vec![(running + 1) * 1024],
            ..CacheConfig::default()
        },
        scheduler: SchedulerConfig {
            page_tokens: PAGE_TOKENS,
            max_running: running,
            max_queue: waiting + running,
            step_tokens: 4096,
            max_model_len: 16_384,
            queue_timeout_s: 0,
            ..SchedulerConfig::default()
        },
        limits: Limits::default(),
        router: RouterConfig::default(),
    })
    .unwrap();
    let ns = core.namespace(&NamespaceKey::default()).unwrap();
    for request in 0..running + waiting {
        let prompt = stream(4 << 32 | u64::from(request), 96);
        let new = NewRequest {
            ignore_eos: true,
            ..NewRequest::new(ns, prompt, 8192)
        };
        let _ = core.add(new, 1);
    }
    core
}

/// Plans a step; the time of that. Every row that draws gets token 7.
fn step(core: &mut ServingCore, at: u64) -> Duration {
    let begin = now();
    let plan = core.schedule(ReplicaId(0), at);
    let spent = since(begin);
    let plan = plan.unwrap();
    let rows = plan.rows.iter().map(|row| {
        let mut out = RowOut::default();
        if row.sample.is_some() {
            out.accepted.push(7);
        }
        out
    });
    let output = StepOutput {
        rows: rows.collect(),
    };
    core.complete(plan.replica, plan.id, &output, at);
    let mut emits = Vec::new();
    core.drain_emits(&mut emits);
    spent
}

fn schedule(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("schedule");
    group.sample_size(10);
    let loads: &[(u32, u32)] = if measuring() {
        &[(16, 0), (64, 0), (64, 1024), (256, 1024)]
    } else {
        &[(2, 2)]
    };
    for &(running, waiting) in loads {
        let id = format!("{running} running, {waiting} waiting");
        group.bench_function(id, |bencher| {
            bencher.iter_custom(|iters| {
                let (mut left, mut spent) = (iters, Duration::ZERO);
                while left > 0 {
                    // Answers are long enough for the steps of one core.
                    let mut core = core(running, waiting);
                    let count = left.min(4096);
                    for at in 1..=8 {
                        step(&mut core, at * STEP_NS);
                    }
                    spent += (9..9 + count)
                        .map(|at| step(&mut core, at * STEP_NS))
                        .sum::<Duration>();
                    core.end_all((10 + count) * STEP_NS);
                    left -= count;
                }
                spent
            });
        });
    }
}

criterion_group!(benches, demote, promote, policy, schedule);
criterion_main!(benches);
