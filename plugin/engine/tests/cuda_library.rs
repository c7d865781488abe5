//! Large products by cuBLASLt on the mock driver, whose library is plain loops that refuse what
//! does not fit: the text is the same with it and without, invariant numerics never use it, and
//! each call is made to fail.
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

use half::f16;
use mock::{Fault, Mock, Outcome, Variant, on_mock, outcome_with};
use rootstock::memory::StepId;
use rootstock::{Backend, StepError};
use rootstock_engine::cuda_backend::{CudaBackend, CudaBackendConfig, CudaModel};
use rootstock_engine::gguf::{Gguf, TensorType};
use rootstock_kernels::cuda::{Device, KvFormat, Numerics};
use tiny::{Part, VOCAB, plan};

const ENGINE: Variant = Variant {
    head_dims: &[16, 32],
    kv_types: &[0, 1, 2, 3, 4],
    sanitized: false,
    fault: None,
};

/// A tiny model whose matrices are F16, as the library takes them.
fn on_cuda(family: &str, numerics: Numerics, library: bool) -> CudaBackend {
    let halves = |values: &[f32]| {
        let bytes = values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes());
        (TensorType::F16, bytes.collect())
    };
    let file = tiny::writer_of(family, &[], &halves).to_bytes();
    let device = Device::open(0).unwrap();
    let model = CudaModel::load(&Gguf::from_bytes(file).unwrap(), &device, None, None).unwrap();
    let config = CudaBackendConfig {
        pages: 64,
        kv_format: KvFormat::F32,
        numerics,
        library,
        ..CudaBackendConfig::default()
    };
    CudaBackend::new(model, &config, None).unwrap()
}

/// Two prompts together, 51 tokens, and some tokens of each.
fn texts(cuda: &mut CudaBackend, before: u64, outputs: u32) -> Result<Vec<Vec<u32>>, StepError> {
    let prompts = [31, 20].map(|len: u32| {
        let tokens = (0..len).map(|i| (i * 31 + len * 17 + i * i) % VOCAB as u32);
        tokens.collect::<Vec<u32>>()
    });
    let pages: [Vec<u32>; 2] = [(1..4).collect(), (5..8).collect()];
    let mut drawn = vec![Vec::new(); 2];
    for id in 0..outputs {
        let last: Vec<Vec<u32>> = drawn
            .iter()
            .map(|text: &Vec<u32>| text.last().copied().into_iter().collect())
            .collect();
        let parts: Vec<Part<'_>> = prompts
            .iter()
            .enumerate()
            .map(|(row, prompt)| match id {
                0 => Part::new(prompt, 0, &pages[row]).greedy(0),
                _ => Part::new(&last[row], prompt.len() as u32 + id - 1, &pages[row]).greedy(id),
            })
            .collect();
        let step = before + u64::from(id);
        cuda.launch(plan(step, &parts))?;
        let output = cuda.wait(StepId(step))?;
        for (row, text) in output.rows.iter().zip(&mut drawn) {
            text.extend_from_slice(&row.accepted);
        }
    }
    Ok(drawn)
}

#[test]
fn the_text_is_the_same_with_the_library_and_without() {
    if !on_mock("the_text_is_the_same_with_the_library_and_without", &ENGINE) {
        return;
    }
    let mock = Mock::new();
    for family in tiny::FAMILIES {
        let mut without = on_cuda(family, Numerics::Fast, false);
        assert_eq!(without.caps().numerics_id, "cuda3-sm80-fast/kv-f32");
        let before = mock.report().products;
        let given = || mock.report().products - before;
        let expected = texts(&mut without, 1, 4).unwrap();
        assert_eq!(given(), 0);
        let mut with = on_cuda(family, Numerics::Fast, true);
        assert_eq!(with.caps().numerics_id, "cuda3-sm80-fast-lt120900/kv-f32");
        assert_eq!(texts(&mut with, 1, 4).unwrap(), expected, "{family}");
        // Seven products of each layer of the prompts; the head has two rows only.
        let wanted = 7 * tiny::LAYERS as u64;
        assert_eq!(given(), wanted, "{family}");
        drop((with, without));
        // Sums have one order whatever the number of tokens: the library promises none.
        let mut invariant = on_cuda(family, Numerics::Invariant, true);
        assert_eq!(texts(&mut invariant, 1, 4).unwrap(), expected, "{family}");
        assert_eq!(given(), wanted);
        drop(invariant);
        assert_eq!(mock.report().held(), [0; 9]);
    }
}

#[test]
fn without_the_library_our_own_kernels_compute() {
    const MISSING: Fault = Fault {
        name: "a library without one of its functions",
        file: "blas.cc",
        from: "CALL(cublasLtMatmul, ",
        to: "CALL(cublasLtMatmul_not_there, ",
    };
    let test = "without_the_library_our_own_kernels_compute";
    if std::env::var_os("WITHOUT_LIBRARY").is_none() {
        let variant = Variant {
            fault: Some(MISSING),
            ..ENGINE
        };
        let outcome = outcome_with(test, &variant, &[("WITHOUT_LIBRARY", "1")]);
        assert!(!matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
        return;
    }
    let mut wanted = on_cuda("llama", Numerics::Fast, true);
    assert_eq!(wanted.caps().numerics_id, "cuda3-sm80-fast/kv-f32");
    let expected = texts(&mut on_cuda("llama", Numerics::Fast, false), 1, 4).unwrap();
    assert_eq!(texts(&mut wanted, 1, 4).unwrap(), expected);
}

#[test]
fn a_call_of_the_library_that_fails_costs_no_request() {
    if !on_mock("a_call_of_the_library_that_fails_costs_no_request", &ENGINE) {
        return;
    }
    let mock = Mock::new();
    let expected = texts(&mut on_cuda("qwen2", Numerics::Fast, true), 1, 1).unwrap();
    // A prime, so that every kind of call comes up.
    let every = if std::env::var_os("EVERY_CALL").is_some() {
        1
    } else {
        5
    };
    let (mut failed, mut calls) = (0, BTreeSet::new());
    let mut n = 1;
    loop {
        let mut cuda = on_cuda("qwen2", Numerics::Fast, true);
        mock.fail_at(n, 999);
        let outcome = texts(&mut cuda, 1, 1);
        let (reached, call) = (mock.report().failed == 1, mock.failed_call());
        mock.fail_at(0, 0);
        let of_library = reached && call.starts_with("cublasLt");
        match outcome {
            Ok(found) => assert_eq!(found, expected, "call {n}: {call}"),
            Err(StepError::Failed { .. }) if !of_library => failed += 1,
            Err(error) => unreachable!("call {n}, {call}: {error}"),
        }
        if of_library {
            calls.insert(call);
        }
        assert_eq!(texts(&mut cuda, 10, 1).unwrap(), expected, "after call {n}");
        if !reached {
            break;
        }
        n += every;
    }
    println!("\n    {failed} steps failed by calls of the driver, none by {calls:?}");
    assert!(calls.len() >= if every == 1 { 8 } else { 4 }, "{calls:?}");
}
