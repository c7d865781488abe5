//! What do the verbs of the prefix cache cost, and how do they grow with the tree?
//!
//! `cargo bench -p rootstock-benches --bench radix -- FILTER`; as a test, each bench runs once on
//! a small tree. The micro tree has `n` leaves of 64 tokens, 32 to a parent of 64, pages of 16; a
//! key is one parent and one leaf, 128 tokens. Inputs are functions of fixed seeds. Figures to
//! keep go to `benches/record/`. Times are processor time of the thread.
//!
//! | bench | the decision it serves |
//! |---|---|
//! | `match_end` | how children are found: one table or one map a node, fingerprints, node size |
//! | `miss` | whether `probe` is cheap enough for queues that ask it for each waiting request |
//! | `insert` | where tokens live: shared buffers or a copy a node |
//! | `extend` | growing leaves in place or a node a page, what decode pays every 16 tokens |
//! | `evict` | the eviction index: its cost must not grow with the tree, as a rebuilt heap's does |
//! | `split` | whether a split moves tokens |
//! | `shape` | the shapes that trees are bad at (W3), whole requests |
//! | `fleet` | the agent fleet (W1), whole requests under pressure |
#![expect(clippy::unwrap_used, reason = "a bench stops at the first error")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rootstock_benches::drive::{Bench, DEVICE, REPLICA, drive, now, since};
use rootstock_benches::fleet::Fleet;
use rootstock_benches::micro::{LEAF_TOKENS, LEAVES_A_PARENT, key};
use rootstock_benches::python_random::PythonRandom;
use rootstock_benches::workload::{Request, Shape, Span};
use rootstock_radix::{Key, PolicyKind};

const PAGE_TOKENS: u32 = 16;
const LEAF_PAGES: u32 = LEAF_TOKENS / PAGE_TOKENS;
/// Operations between two looks at the clock.
const BATCH: u64 = 256;
/// Capacity of the shapes and the fleet, in tokens.
const CAPACITY_TOKENS: u32 = 1 << 20;

/// Leaves of the micro trees.
fn sizes() -> &'static [u32] {
    if measuring() {
        &[1_000, 10_000, 100_000, 1_000_000]
    } else {
        &[100]
    }
}

/// False when the benches run as tests.
fn measuring() -> bool {
    std::env::args().any(|arg| arg == "--bench")
}

/// A tree of `leaves` leaves, with room for `spare` more.
fn tree(leaves: u32, spare: u32) -> Bench {
    tree_of(PAGE_TOKENS, leaves, spare)
}

/// The same with pages of another size.
fn tree_of(page_tokens: u32, leaves: u32, spare: u32) -> Bench {
    let parents = leaves.div_ceil(LEAVES_A_PARENT) + spare.div_ceil(LEAVES_A_PARENT);
    let pages = (leaves + spare + parents) * (LEAF_TOKENS / page_tokens);
    let mut bench = Bench::new(page_tokens, pages, PolicyKind::Lru).unwrap();
    for leaf in 0..leaves {
        assert!(bench.insert(&key(leaf)));
    }
    bench
}

/// Keys of `BATCH` random leaves.
fn random_keys(rng: &mut PythonRandom, leaves: u32) -> Vec<Vec<u32>> {
    (0..BATCH)
        .map(|_| key(rng.randint(0, leaves - 1)))
        .collect()
}

/// Runs `iters` operations in batches: `prepare` makes the inputs of a batch, untimed.
fn batches<I>(iters: u64, mut prepare: impl FnMut(u64) -> I, mut run: impl FnMut(I)) -> Duration {
    let (mut left, mut spent) = (iters, Duration::ZERO);
    while left > 0 {
        let count = left.min(BATCH);
        let input = prepare(count);
        let begin = now();
        run(input);
        spent += since(begin);
        left -= count;
    }
    spent
}

fn match_end(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("match_end");
    let others = if measuring() { 10_000 } else { 100 };
    let mut cases: Vec<(u32, u32)> = sizes()
        .iter()
        .map(|&leaves| (PAGE_TOKENS, leaves))
        .collect();
    cases.extend([(1, others), (64, others)]);
    for (page_tokens, leaves) in cases {
        let mut bench = tree_of(page_tokens, leaves, 0);
        let mut rng = PythonRandom::new(1);
        let id = BenchmarkId::new(format!("pages of {page_tokens}"), leaves);
        group.bench_function(id, |bencher| {
            bencher.iter_custom(|iters| {
                let prepare = |count| (count, random_keys(&mut rng, leaves));
                batches(iters, prepare, |(count, keys)| {
                    for key in keys.iter().take(usize::try_from(count).unwrap()) {
                        let (lease, found) = bench.begin(key);
                        assert_eq!(found, 2 * LEAF_TOKENS);
                        bench.end(lease);
                    }
                })
            });
        });
    }
}

fn miss(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("miss");
    for &leaves in sizes() {
        let bench = tree(leaves, 0);
        let unknown = key(u32::MAX);
        group.bench_function(BenchmarkId::from_parameter(leaves), |bencher| {
            let key = Key {
                ns: bench.ns,
                tokens: &unknown,
            };
            bencher.iter_custom(|iters| {
                let run = |count| {
                    for _ in 0..count {
                        black_box(bench.cache.probe(black_box(key), REPLICA));
                    }
                };
                batches(iters, |count| count, run)
            });
        });
    }
}

fn insert(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("insert");
    for &leaves in sizes() {
        let mut bench = tree(leaves, 2 * u32::try_from(BATCH).unwrap());
        let mut next = leaves;
        group.bench_function(BenchmarkId::from_parameter(leaves), |bencher| {
            bencher.iter_custom(|iters| {
                let mut keys = Vec::new();
                let mut spent = Duration::ZERO;
                let mut left = iters;
                while left > 0 {
                    let count = u32::try_from(left.min(BATCH)).unwrap();
                    bench
                        .cache
                        .make_room(DEVICE, (count + 16) * LEAF_PAGES, 0)
                        .unwrap();
                    keys.clear();
                    keys.extend((next..next + count).map(key));
                    next += count;
                    let begin = now();
                    for key in &keys {
                        assert!(bench.insert(key));
                    }
                    spent += since(begin);
                    left -= u64::from(count);
                }
                spent
            });
        });
    }
}

fn extend(criterion: &mut Criterion) {
    const PAGES: u64 = 64;
    let mut group = criterion.benchmark_group("extend");
    group.throughput(Throughput::Elements(PAGES));
    for &leaves in sizes() {
        let mut bench = tree(leaves, 64);
        let tokens = key(0);
        let mut answer = 0_u64;
        group.bench_function(BenchmarkId::new("64 pages", leaves), |bencher| {
            bencher.iter_custom(|iters| {
                let mut spent = Duration::ZERO;
                for _ in 0..iters {
                    answer += 1;
                    let len = u32::try_from(PAGES).unwrap() * PAGE_TOKENS;
                    let span = Span {
                        stream: 3 << 32 | answer,
                        start: 0,
                        len,
                    };
                    let mut output = Vec::new();
                    Request::new(vec![span], 0).tokens(&mut output);
                    bench.cache.make_room(DEVICE, 64, 0).unwrap();
                    let (mut lease, _) = bench.begin(&tokens);
                    let begin = now();
                    for page in output.chunks_exact(PAGE_TOKENS as usize) {
                        let pages = bench.take(1).unwrap();
                        bench.extend(&mut lease, page, pages);
                    }
                    spent += since(begin);
                    bench.end(lease);
                }
                spent
            });
        });
    }
}

fn evict(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("evict");
    for &leaves in sizes() {
        for evicted in [1_u32, 64] {
            // Up to 64 calls in a row, so that looking at the clock does not count.
            let calls = (leaves / 4 / evicted).min(64);
            if calls == 0 {
                continue;
            }
            let mut bench = tree(leaves, 0);
            let mut next = leaves;
            let id = BenchmarkId::new(format!("{evicted} leaves"), leaves);
            group.bench_function(id, |bencher| {
                bencher.iter_custom(|iters| {
                    let (mut left, mut spent) = (iters, Duration::ZERO);
                    while left > 0 {
                        let count = u32::try_from(left.min(u64::from(calls))).unwrap();
                        next = fill(&mut bench, next);
                        spent += evict_calls(&mut bench, count, evicted * LEAF_PAGES);
                        left -= u64::from(count);
                    }
                    spent
                });
            });
        }
    }
}

/// Inserts leaves from number `next` on until there is room for none; returns the next number.
fn fill(bench: &mut Bench, mut next: u32) -> u32 {
    while bench.cache.stats().tiers[0].free >= 2 * LEAF_PAGES {
        assert!(bench.insert(&key(next)));
        next += 1;
    }
    next
}

/// The time of `count` calls that each evict `pages` more.
fn evict_calls(bench: &mut Bench, count: u32, pages: u32) -> Duration {
    let free = bench.cache.stats().tiers[0].free;
    let begin = now();
    for call in 1..=count {
        let room = bench.cache.make_room(DEVICE, free + call * pages, 0);
        assert!(black_box(room).is_ok());
    }
    since(begin)
}

fn split(criterion: &mut Criterion) {
    let requests = Shape::Split.workload().requests;
    let count = if measuring() { 1000 } else { 20 };
    let tokens = |request: &Request| {
        let mut tokens = Vec::new();
        request.tokens(&mut tokens);
        tokens
    };
    let keys: Vec<Vec<u32>> = requests.iter().take(count + 1).map(tokens).collect();
    let (whole, cuts) = keys.split_first().unwrap();
    let mut group = criterion.benchmark_group("split");
    group
        .throughput(Throughput::Elements(count as u64))
        .sample_size(10);
    group.bench_function("one edge of 64,128 tokens at random places", |bencher| {
        bencher.iter_custom(|iters| {
            let mut spent = Duration::ZERO;
            for _ in 0..iters {
                let pages = 64_128 / PAGE_TOKENS + 4;
                let mut bench = Bench::new(PAGE_TOKENS, pages, PolicyKind::Lru).unwrap();
                assert!(bench.insert(whole));
                let begin = now();
                for cut in cuts {
                    let (lease, _) = bench.begin(cut);
                    bench.end(lease);
                }
                spent += since(begin);
            }
            spent
        });
    });
}

fn shape(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("shape");
    group.sample_size(10);
    for shape in Shape::ALL {
        let mut workload = shape.workload();
        if !measuring() {
            workload.requests.truncate(20);
            workload.ops.truncate(40);
        }
        group.throughput(Throughput::Elements(workload.requests.len() as u64));
        group.bench_function(shape.name(), |bencher| {
            bencher.iter_custom(|iters| {
                let run = || drive(&workload, PAGE_TOKENS, CAPACITY_TOKENS * 2, PolicyKind::Lru);
                (0..iters).map(|_| run().unwrap().spent).sum()
            });
        });
    }
}

fn fleet(criterion: &mut Criterion) {
    let mut workload = Fleet::new(1).workload;
    if !measuring() {
        workload.ops.truncate(40);
    }
    let requests = workload.requests.len() as u64;
    let mut group = criterion.benchmark_group("fleet");
    group
        .sample_size(10)
        .throughput(Throughput::Elements(requests));
    for policy in [PolicyKind::Lru, PolicyKind::Priority] {
        group.bench_function(format!("{policy:?}").to_lowercase(), |bencher| {
            bencher.iter_custom(|iters| {
                let run = || drive(&workload, PAGE_TOKENS, CAPACITY_TOKENS, policy);
                (0..iters).map(|_| run().unwrap().spent).sum()
            });
        });
    }
}

criterion_group!(
    benches, match_end, miss, insert, extend, evict, split, shape, fleet
);
criterion_main!(benches);
