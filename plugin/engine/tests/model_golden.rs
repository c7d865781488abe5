//! Logits of the tiny models against an independent reference, and the invariance of a text from
//! chunking, page tables and company.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "helpers of tests, with small numbers"
)]

#[path = "support/tiny.rs"]
mod tiny;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rootstock::Backend;
use rootstock::memory::{KvDtype, PageId, StepId};
use rootstock_engine::cpu_backend::{CpuBackend, CpuBackendConfig};
use rootstock_engine::error::EngineError;
use rootstock_engine::gguf::Gguf;
use rootstock_engine::model::Model;
use rootstock_kernels::{Isa, KvRow};
use tiny::{Part, VOCAB, plan, tokens};

fn backend(family: &str, isa: Isa, kv_dtype: KvDtype, max_in_flight: u8) -> CpuBackend {
    let model = Model::load(&tiny::file(family), isa, 2).unwrap();
    let config = CpuBackendConfig {
        pages: 64,
        page_tokens: 16,
        kv_dtype,
        threads: 2,
        max_in_flight,
        ..CpuBackendConfig::default()
    };
    CpuBackend::new(Arc::new(model), &config, None).unwrap()
}

fn golden(family: &str) -> Vec<f32> {
    let path = format!(
        "{}/tests/data/tiny_{family}.golden",
        env!("CARGO_MANIFEST_DIR")
    );
    let bytes = std::fs::read(path).unwrap();
    bytes
        .chunks_exact(4)
        .map(|four| f32::from_le_bytes(four.try_into().unwrap()))
        .collect()
}

fn logits(backend: &mut CpuBackend, chunks: &[usize], pages: &[u32]) -> Vec<f32> {
    let tokens = tokens();
    let mut out = Vec::new();
    let pages: Vec<PageId> = pages.iter().map(|&page| PageId::new(page)).collect();
    let mut first = 0;
    for &len in chunks {
        let row = KvRow {
            first_pos: first as u32,
            len: len as u32,
            pages: &pages,
        };
        backend
            .logits(&tokens[first..first + len], row, &mut out)
            .unwrap();
        first += len;
    }
    assert_eq!(first, tokens.len());
    out
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    // A NaN must not hide behind max.
    differences.fold(0.0, |most, d| {
        if d.is_nan() {
            f32::INFINITY
        } else {
            most.max(d)
        }
    })
}

#[test]
fn every_position_of_every_family_agrees_with_the_reference() {
    for family in tiny::FAMILIES {
        let golden = golden(family);
        let mut backend = backend(family, Isa::Scalar, KvDtype::F32, 1);
        let got = logits(&mut backend, &[40], &[1, 2, 3]);
        let difference = largest_difference(&golden, &got);
        println!("{family}: largest logit difference {difference:e}");
        assert!(difference < 1e-4, "{family}: {difference}");
        for (want, got) in golden.chunks(VOCAB).zip(got.chunks(VOCAB)) {
            let best = |row: &[f32]| rootstock_kernels::argmax(row);
            assert_eq!(best(want), best(got), "{family}");
        }
    }
}

#[test]
fn half_precision_pages_change_logits_little() {
    for family in tiny::FAMILIES {
        let golden = golden(family);
        for (dtype, bound) in [(KvDtype::F16, 0.05), (KvDtype::Bf16, 0.4)] {
            let mut backend = backend(family, Isa::Scalar, dtype, 1);
            let got = logits(&mut backend, &[40], &[1, 2, 3]);
            let difference = largest_difference(&golden, &got);
            println!("{family} {dtype:?}: largest logit difference {difference:e}");
            assert!(difference < bound, "{family} {dtype:?}: {difference}");
            assert!(
                difference > 0.0,
                "{family} {dtype:?} was not rounded at all"
            );
        }
    }
}

#[test]
fn chunks_and_page_tables_change_no_bit() {
    for isa in Isa::available() {
        for family in tiny::FAMILIES {
            let mut backend = backend(family, isa, KvDtype::F16, 1);
            let whole = logits(&mut backend, &[40], &[1, 2, 3]);
            for chunks in [vec![1; 40], vec![16, 16, 8], vec![7, 33], vec![39, 1]] {
                let pages = [9, 33, 17];
                let got = logits(&mut backend, &chunks, &pages);
                assert!(whole == got, "{family} {} {chunks:?}", isa.name());
            }
        }
    }
}

/// Greedy texts of rows that run together, each on its own pages.
fn texts(backend: &mut CpuBackend, prompts: &[&[u32]], outputs: usize) -> Vec<Vec<u32>> {
    let pages: Vec<Vec<u32>> = (0..prompts.len() as u32)
        .map(|row| (row * 5 + 1..row * 5 + 6).collect())
        .collect();
    let mut histories: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.to_vec()).collect();
    let mut done = vec![0; prompts.len()];
    for id in 1..=outputs as u64 {
        let parts: Vec<Part<'_>> = (0..prompts.len())
            .map(|row| {
                let first = done[row];
                Part::new(&histories[row][first..], first as u32, &pages[row]).greedy(id as u32 - 1)
            })
            .collect();
        backend.launch(plan(id, &parts)).unwrap();
        let output = backend.wait(StepId(id)).unwrap();
        for (row, out) in output.rows.iter().enumerate() {
            done[row] = histories[row].len();
            histories[row].extend_from_slice(&out.accepted);
        }
    }
    histories
        .iter()
        .zip(prompts)
        .map(|(all, prompt)| all[prompt.len()..].to_vec())
        .collect()
}

#[test]
fn a_text_is_the_same_alone_and_in_company() {
    let all = tokens();
    let prompts: [&[u32]; 4] = [&all[..1], &all[3..20], &all[5..38], &all[7..9]];
    for isa in Isa::available() {
        for family in tiny::FAMILIES {
            let mut backend = backend(family, isa, KvDtype::F16, 1);
            let together = texts(&mut backend, &prompts, 20);
            for (prompt, text) in prompts.iter().zip(&together) {
                assert_eq!(&texts(&mut backend, &[prompt], 20)[0], text, "{family}");
            }
        }
    }
}

#[test]
fn a_row_continues_from_a_step_that_is_still_in_flight() {
    let all = tokens();
    let mut backend = backend("llama", Isa::detect(), KvDtype::F16, 2);
    let want = texts(&mut backend, &[&all[..17]], 6).remove(0);
    let pages = [50, 51];
    let prompt = Part::new(&all[..17], 0, &pages).greedy(0);
    backend.launch(plan(101, &[prompt])).unwrap();
    let mut got = Vec::new();
    for index in 1..6_u32 {
        let id = 101 + u64::from(index);
        let next = Part::new(&[0], 16 + index, &pages)
            .greedy(index)
            .after(id - 1, 0);
        backend.launch(plan(id, &[next])).unwrap();
        got.extend(
            backend.wait(StepId(id - 1)).unwrap().rows[0]
                .accepted
                .iter()
                .copied(),
        );
    }
    got.extend(
        backend.wait(StepId(106)).unwrap().rows[0]
            .accepted
            .iter()
            .copied(),
    );
    assert_eq!(got, want);
}

#[test]
fn a_step_stopped_between_its_layers_says_the_same_whatever_ran_in_between() {
    let all = tokens();
    for family in ["llama", "qwen3"] {
        let mut backend = backend(family, Isa::detect(), KvDtype::F16, 1);
        let want = [&all[..17], &all[3..12]].map(|prompt| texts(&mut backend, &[prompt], 1));
        let first = Part::new(&all[..17], 0, &[50, 51]).greedy(0);
        let other = Part::new(&all[3..12], 0, &[52]).greedy(0);
        let (set, never) = (AtomicBool::new(true), AtomicBool::new(false));
        backend.launch(plan(201, &[first])).unwrap();
        assert!(backend.advance(StepId(201), &set).unwrap().is_none());
        // Twice, so that a step is stopped again where it went on.
        for id in [202, 203] {
            let mut between = plan(id, std::slice::from_ref(&other));
            between.overtakes = true;
            backend.launch(between).unwrap();
            let output = backend.wait(StepId(id)).unwrap();
            assert_eq!(output.rows[0].accepted.as_slice(), want[1][0], "{family}");
        }
        let output = backend.advance(StepId(201), &never).unwrap().unwrap();
        assert_eq!(output.rows[0].accepted.as_slice(), want[0][0], "{family}");
    }
}

#[test]
fn a_row_whose_source_never_came_is_left_out_and_the_others_go_on() {
    let all = tokens();
    let mut backend = backend("qwen3", Isa::detect(), KvDtype::F16, 1);
    let want = texts(&mut backend, &[&all[..5]], 1).remove(0);
    let (lost, kept) = ([40, 41], [42, 43]);
    let parts = [
        Part::new(&[0], 16, &lost).greedy(3).after(77, 0),
        Part::new(&all[..5], 0, &kept).greedy(0),
    ];
    backend.launch(plan(9, &parts)).unwrap();
    let output = backend.wait(StepId(9)).unwrap();
    assert!(output.rows[0].accepted.is_empty());
    assert_eq!(output.rows[1].accepted.as_slice(), want);
}

#[test]
fn plans_that_cannot_be_computed_are_refused_with_the_row() {
    let mut backend = backend("llama", Isa::Scalar, KvDtype::F32, 1);
    let many = [1; 33];
    let cases = [
        (Part::new(&[304], 0, &[1]), "token 304"),
        (Part::new(&many, 0, &[1, 2]), "3 needed"),
        (Part::new(&[1], 0, &[0]), "page 0"),
        (Part::new(&[1], 0, &[65]), "page 65"),
        (Part::new(&[], 0, &[1]), "0 tokens"),
    ];
    for (part, word) in cases {
        let error = backend.launch(plan(1, &[part])).unwrap_err().to_string();
        assert!(error.contains("row 0") && error.contains(word), "{error}");
    }
    backend
        .launch(plan(2, &[Part::new(&[1], 0, &[1])]))
        .unwrap();
    let error = backend
        .launch(plan(3, &[Part::new(&[1], 0, &[1])]))
        .unwrap_err();
    assert!(error.to_string().contains("at most 1"), "{error}");
    assert!(backend.wait(StepId(3)).is_err(), "step 3 never started");
    assert!(backend.wait(StepId(2)).is_ok());
}

fn refusal(file: rootstock_engine::gguf::GgufWriter) -> String {
    let file = Gguf::from_bytes(file.to_bytes()).unwrap();
    let error: EngineError = Model::load(&file, Isa::Scalar, 1).unwrap_err();
    error.to_string()
}

#[test]
fn what_a_file_asks_for_and_cannot_get_is_refused_by_name() {
    let said = |text: String, words: &[&str]| {
        for word in words {
            assert!(text.contains(word), "{text:?} does not say {word:?}");
        }
    };
    let other = tiny::writer("llama", &[]).text("other", "x");
    let gemma = rootstock_engine::gguf::GgufWriter::new().text("general.architecture", "gemma3");
    said(refusal(gemma), &["gemma3", "qwen3"]);
    said(
        refusal(other.int("llama.expert_count", 8_u32)),
        &["llama.expert_count", "8"],
    );
    let long = tiny::writer("llama", &[]).text("llama.rope.scaling.type", "longrope");
    said(
        refusal(long),
        &["llama.rope.scaling.type", "longrope", "yarn"],
    );
    let partial = tiny::writer("qwen2", &[]).int("qwen2.rope.dimension_count", 8_u32);
    said(refusal(partial), &["qwen2.rope.dimension_count", "8", "16"]);
    let missing = tiny::writer("llama", &["blk.1.ffn_up.weight"]);
    said(refusal(missing), &["blk.1.ffn_up.weight", "missing"]);
    let name = "blk.0.attn_k.weight";
    let misshapen = tiny::writer("llama", &[name]).tensor_f32(name, &[64, 16], &[0.0; 1024]);
    said(refusal(misshapen), &[name, "[64, 16]", "[64, 32]"]);
    let norm = "output_norm.weight";
    let typed = tiny::writer("llama", &[norm]).tensor(
        norm,
        &[64],
        rootstock_engine::gguf::TensorType::Q8_0,
        vec![0; 68],
    );
    said(refusal(typed), &[norm, "Q8_0", "F32"]);
}
