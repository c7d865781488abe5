//! Graphs of decode steps on the mock driver: the text is the CPU's with and without them, whatever
//! the number of steps in flight; buffers that move, drivers without graphs, captures that fail.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "helpers of tests, with small numbers"
)]

#[path = "../../../kernels/tests/cuda/mock.rs"]
mod mock;
#[path = "support/tiny.rs"]
mod tiny;

use std::collections::BTreeSet;
use std::sync::Arc;

use mock::{Fault, Mock, Outcome, Variant, on_mock, outcome_with};
use rootstock::memory::{KvDtype, PageId, StepId};
use rootstock::scheduler::SamplingParams;
use rootstock::{Backend, StepError};
use rootstock_engine::cpu_backend::{CpuBackend, CpuBackendConfig};
use rootstock_engine::cuda_backend::{CudaBackend, CudaBackendConfig, CudaModel};
use rootstock_engine::model::Model;
use rootstock_kernels::cuda::{Device, KvFormat, Numerics};
use rootstock_kernels::{Isa, KvRow};
use tiny::{Part, VOCAB, plan};

const ENGINE: Variant = Variant {
    head_dims: &[16, 32],
    kv_types: &[0, 1, 2, 3, 4],
    sanitized: false,
    fault: None,
};

const PAGES: u32 = 128;

fn on_cuda(family: &str, numerics: Numerics, in_flight: u8, graphs: u32) -> CudaBackend {
    let device = Device::open(0).unwrap();
    let model = CudaModel::load(&tiny::file(family), &device, None, None).unwrap();
    let config = CudaBackendConfig {
        pages: PAGES,
        kv_format: KvFormat::F32,
        max_in_flight: in_flight,
        numerics,
        graphs,
        ..CudaBackendConfig::default()
    };
    CudaBackend::new(model, &config, None).unwrap()
}

fn on_cpu(family: &str) -> CpuBackend {
    let model = Model::load(&tiny::file(family), Isa::Scalar, 1).unwrap();
    let config = CpuBackendConfig {
        pages: PAGES,
        kv_dtype: KvDtype::F32,
        threads: 1,
        ..CpuBackendConfig::default()
    };
    CpuBackend::new(Arc::new(model), &config, None).unwrap()
}

/// A request: its prompt, its pages, and how it draws.
#[derive(Clone, Debug)]
struct Ask {
    prompt: Vec<u32>,
    pages: Vec<u32>,
    sample: SamplingParams,
}

fn ask(seed: u32, len: u32, pages: std::ops::Range<u32>, temperature: f32) -> Ask {
    Ask {
        prompt: (0..len)
            .map(|i| (i * 31 + i * i + seed * 17 + 5) % VOCAB as u32)
            .collect(),
        pages: pages.collect(),
        sample: SamplingParams {
            temperature,
            seed: u64::from(seed),
            ..SamplingParams::greedy()
        },
    }
}

/// Three requests, so that a batch of four has an idle row; one of them draws on the host.
fn three() -> Vec<Ask> {
    let mut last = ask(3, 23, 11..16, 0.0);
    last.sample.logprobs = Some(2);
    vec![ask(1, 9, 1..6, 0.0), ask(2, 16, 6..11, 0.9), last]
}

/// Texts of requests that run together. Where the backend takes two steps in flight, each is
/// launched before the one before it is waited for, and continues from its draws.
fn texts(backend: &mut dyn Backend, asks: &[Ask], outputs: u64, before: u64) -> Vec<Vec<u32>> {
    let depth = u64::from(backend.caps().max_in_flight);
    let mut drawn: Vec<Vec<u32>> = vec![Vec::new(); asks.len()];
    for id in 1..outputs + depth {
        if id <= outputs {
            let last: Vec<[u32; 1]> = drawn
                .iter()
                .map(|text| [text.last().copied().unwrap_or(0)])
                .collect();
            let parts = asks.iter().enumerate().map(|(row, ask)| {
                let first_pos = ask.prompt.len() as u32 + id as u32 - 2;
                let part = match (id, depth) {
                    (1, _) => Part::new(&ask.prompt, 0, &ask.pages),
                    (_, 1) => Part::new(&last[row], first_pos, &ask.pages),
                    _ => Part::new(&[0], first_pos, &ask.pages).after(before + id - 1, row as u32),
                };
                Part {
                    sample: Some(ask.sample.clone()),
                    output_index: id as u32 - 1,
                    ..part
                }
            });
            let parts: Vec<Part<'_>> = parts.collect();
            backend.launch(plan(before + id, &parts)).unwrap();
        }
        if id >= depth {
            let output = backend.wait(StepId(before + id + 1 - depth)).unwrap();
            for (row, text) in output.rows.iter().zip(&mut drawn) {
                text.extend_from_slice(&row.accepted);
            }
        }
    }
    drawn
}

#[test]
fn texts_are_those_of_the_cpu_with_graphs_and_without() {
    if !on_mock(
        "texts_are_those_of_the_cpu_with_graphs_and_without",
        &ENGINE,
    ) {
        return;
    }
    let mock = Mock::new();
    let outputs = 10;
    for family in tiny::FAMILIES {
        let expected = texts(&mut on_cpu(family), &three(), outputs, 0);
        for numerics in [Numerics::Fast, Numerics::Invariant] {
            for in_flight in [1, 2] {
                // Without graphs the texts are compared in `cuda_backend`, too.
                for graphs in if family == "llama" {
                    &[0, 64][..]
                } else {
                    &[64]
                } {
                    let graphs = *graphs;
                    let mut cuda = on_cuda(family, numerics, in_flight, graphs);
                    let before = mock.report();
                    let found = texts(&mut cuda, &three(), outputs, 0);
                    assert_eq!(
                        found, expected,
                        "{family} {numerics:?} {in_flight} {graphs}"
                    );
                    let after = mock.report();
                    let launched = after.graph_launches - before.graph_launches;
                    // The prompts, and the first decode step of each step in flight, go kernel by
                    // kernel.
                    let plain = 1 + u64::from(in_flight);
                    let wanted = if graphs == 0 { 0 } else { outputs - plain };
                    assert_eq!(launched, wanted, "{family} {numerics:?} {in_flight}");
                    let (count, bytes) = cuda.graphs();
                    assert_eq!(count, if graphs == 0 { 0 } else { in_flight.into() });
                    assert_eq!(bytes > 0, graphs > 0);
                }
            }
        }
    }
    assert_eq!(mock.report().held(), [0; 9]);
}

#[test]
fn a_graph_that_is_started_again_costs_less_than_a_third_of_the_calls() {
    if !on_mock(
        "a_graph_that_is_started_again_costs_less_than_a_third_of_the_calls",
        &ENGINE,
    ) {
        return;
    }
    let mock = Mock::new();
    let step = |graphs| {
        let mut cuda = on_cuda("llama", Numerics::Fast, 1, graphs);
        texts(&mut cuda, &three()[..2], 6, 0);
        let calls = mock.report().calls;
        let part = [5];
        let parts = [
            Part::new(&part, 14, &[1]).greedy(0),
            Part::new(&part, 21, &[6, 7]).greedy(0),
        ];
        cuda.launch(plan(9, &parts)).unwrap();
        let calls = mock.report().calls - calls;
        cuda.wait(StepId(9)).unwrap();
        calls
    };
    let (plain, graph) = (step(0), step(64));
    // The tiny model has two layers: the share falls with every further one.
    println!(
        "\n    calls of the driver to launch a step of two layers: {plain}, by a graph {graph}"
    );
    assert!(graph * 3 < plain, "{graph} of {plain}");
}

#[test]
fn in_invariant_numerics_a_request_has_the_same_bits_alone_and_in_company() {
    if !on_mock(
        "in_invariant_numerics_a_request_has_the_same_bits_alone_and_in_company",
        &ENGINE,
    ) {
        return;
    }
    // Contexts on both sides of a split of 512 positions, whose number a graph has fixed.
    let long = ask(1, 506, 1..34, 0.0);
    let short = ask(2, 20, 40..43, 0.0);
    let outputs = 11;
    let logits = |asks: &[Ask], in_flight, graphs| {
        let mut cuda = on_cuda("qwen3", Numerics::Invariant, in_flight, graphs);
        let drawn = texts(&mut cuda, asks, outputs, 0);
        // K and V of every position so far are read back.
        let pages: Vec<PageId> = long.pages.iter().map(|page| PageId::new(*page)).collect();
        let row = KvRow {
            first_pos: 506 + outputs as u32 - 1,
            len: 1,
            pages: &pages,
        };
        let mut out = Vec::new();
        let last = drawn[0].last().copied().unwrap();
        cuda.logits(&[last], row, &mut out).unwrap();
        assert!(graphs == 0 || cuda.graphs().0 >= 2, "{:?}", cuda.graphs());
        (drawn[0].clone(), out)
    };
    let alone = logits(std::slice::from_ref(&long), 1, 0);
    let both = [long.clone(), short];
    for (asks, in_flight, graphs) in [(&both[..1], 1, 64), (&both[..], 2, 64)] {
        let found = logits(asks, in_flight, graphs);
        assert!(found == alone, "{} {in_flight} {graphs}", asks.len());
    }
}

#[test]
fn a_buffer_that_moves_takes_its_graphs_with_it() {
    if !on_mock("a_buffer_that_moves_takes_its_graphs_with_it", &ENGINE) {
        return;
    }
    let mock = Mock::new();
    let run = |backend: &mut dyn Backend| {
        let mut all = texts(backend, &three(), 6, 0);
        // A longer prompt moves the activations; the old graph would write where they were.
        all.extend(texts(backend, &[ask(4, 80, 20..27, 0.0)], 3, 10));
        let before = mock.report().graph_launches;
        all.extend(texts(backend, &three(), 6, 20));
        (all, mock.report().graph_launches - before)
    };
    let (expected, _) = run(&mut on_cpu("llama"));
    let mut cuda = on_cuda("llama", Numerics::Fast, 1, 64);
    let (found, launched) = run(&mut cuda);
    assert_eq!(found, expected);
    // Of five decode steps the first is plain again, and the second is captured again.
    assert_eq!(launched, 4);
}

#[test]
fn graphs_are_bounded_in_number_and_by_what_is_free() {
    if !on_mock("graphs_are_bounded_in_number_and_by_what_is_free", &ENGINE) {
        return;
    }
    let mock = Mock::new();
    let mut cuda = on_cuda("llama", Numerics::Fast, 1, 2);
    let asks: Vec<Ask> = (0..5)
        .map(|seed| ask(seed, 6, seed * 2 + 1..seed * 2 + 3, 0.0))
        .collect();
    for (round, count) in [1, 2, 4, 5].into_iter().enumerate() {
        texts(&mut cuda, &asks[..count], 6, 10 * round as u64);
        assert!(cuda.graphs().0 <= 2 && cuda.graphs().0 == (round + 1).min(2));
    }
    drop(cuda);
    // A device that is full has no room for graphs, and the texts are the same.
    let mut cuda = on_cuda("llama", Numerics::Fast, 1, 64);
    let expected = texts(&mut cuda, &asks[..2], 2, 0);
    mock.limit(mock.report().device_bytes as usize + 100);
    let found = texts(&mut cuda, &asks[..2], 6, 10);
    mock.limit(1 << 34);
    assert_eq!(cuda.graphs(), (0, 0));
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found[..2], expected[..]);
    }
}

#[test]
fn a_driver_without_graphs_gives_the_same_text() {
    const MISSING: Fault = Fault {
        name: "a driver without a call for graphs",
        file: "driver.cc",
        from: "CALL(cuGraphUpload,",
        to: "CALL(cuGraphUpload_not_there,",
    };
    let test = "a_driver_without_graphs_gives_the_same_text";
    if std::env::var_os("WITHOUT_GRAPHS").is_none() {
        let variant = Variant {
            fault: Some(MISSING),
            ..ENGINE
        };
        let outcome = outcome_with(test, &variant, &[("WITHOUT_GRAPHS", "1")]);
        assert!(!matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
        return;
    }
    let mut cuda = on_cuda("llama", Numerics::Fast, 1, 64);
    let found = texts(&mut cuda, &three(), 6, 0);
    assert_eq!(found, texts(&mut on_cpu("llama"), &three(), 6, 0));
    assert_eq!(Mock::new().report().graph_launches, 0);
}

/// The calls that only graphs make.
const OF_GRAPHS: [&str; 8] = [
    "cuGraphDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuMemGetInfo_v2",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamEndCapture",
];

#[test]
fn every_call_of_a_capture_made_to_fail_costs_a_step_at_most() {
    if !on_mock(
        "every_call_of_a_capture_made_to_fail_costs_a_step_at_most",
        &ENGINE,
    ) {
        return;
    }
    let mock = Mock::new();
    let asks = three();
    let (mut failed, mut answered) = (0, 0);
    let mut calls = BTreeSet::new();
    // Primes, so that every kind of call comes up.
    let (codes, every): (&[i32], u64) = match std::env::var_os("EVERY_CALL") {
        Some(_) => (&[2, 999], 1),
        None => (&[999], 7),
    };
    for code in codes {
        let mut n = 1;
        loop {
            let mut cuda = on_cuda("llama", Numerics::Invariant, 1, 64);
            let expected = texts(&mut cuda, &asks, 2, 0);
            let step = |id| {
                let token = expected.iter().map(|text| [text[0]]).collect::<Vec<_>>();
                let rows = asks.iter().zip(&token);
                let parts = rows.map(|(ask, token)| Part {
                    sample: Some(ask.sample.clone()),
                    output_index: 1,
                    ..Part::new(token, ask.prompt.len() as u32, &ask.pages)
                });
                plan(id, &parts.collect::<Vec<_>>())
            };
            let check = |output: rootstock::scheduler::StepOutput| {
                for (row, text) in output.rows.iter().zip(&expected) {
                    assert_eq!(row.accepted[..], text[1..], "call {n}");
                }
            };
            // This one is captured.
            mock.fail_at(n, *code);
            let outcome = cuda.launch(step(10)).and_then(|()| cuda.wait(StepId(10)));
            let reached = mock.report().failed == 1;
            if reached {
                calls.insert(mock.failed_call());
            }
            mock.fail_at(0, 0);
            match outcome {
                Ok(output) => {
                    check(output);
                    answered += 1;
                }
                Err(StepError::Failed { .. }) => failed += 1,
                Err(error) => panic!("call {n}: {error}"),
            }
            for id in 11..14 {
                cuda.launch(step(id)).unwrap();
                check(cuda.wait(StepId(id)).unwrap());
            }
            if !reached {
                break;
            }
            n += every;
        }
    }
    println!("\n    {failed} steps failed, {answered} answered: {calls:?}");
    assert!(failed > 0 && answered > 5, "{failed} {answered}");
    if every == 1 {
        for name in OF_GRAPHS {
            assert!(calls.contains(name), "{name} was not made to fail");
        }
    }
}
