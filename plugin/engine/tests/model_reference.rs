//! The default model against float32 logits of an independent implementation
//! (`tests/reference`): the scalar path with f32 KV must agree, the fast path must be close.
//!
//! Without the model each test prints `skipped: no model`. The figures over all positions and the
//! whole vocabulary are made by `make_reference.py compare`; here a part of the positions and the
//! eight best tokens of each keep the paths honest in every run.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "helpers of tests, with small numbers"
)]

#[path = "support/reference.rs"]
mod reference;

use std::sync::Arc;

use reference::{Distance, Sequence};
use rootstock::memory::{KvDtype, PageId};
use rootstock_engine::cpu_backend::{CpuBackend, CpuBackendConfig};
use rootstock_engine::gguf::Gguf;
use rootstock_engine::kernels::{Isa, KvRow};
use rootstock_engine::model::Model;
use rootstock_engine::model_source::{ModelSpec, resolve};

#[expect(clippy::print_stdout, reason = "a skipped test says so")]
fn backend(isa: Isa, kv_dtype: KvDtype) -> Option<CpuBackend> {
    let path = match resolve(&ModelSpec::Auto, &mut |_| {}) {
        Ok(model) => model.path,
        Err(error) => {
            println!("skipped: no model ({error})");
            return None;
        }
    };
    let file = Gguf::open(&path).unwrap();
    let config = CpuBackendConfig {
        pages: 64,
        kv_dtype,
        ..CpuBackendConfig::default()
    };
    let model = Model::load(&file, isa, config.threads).unwrap();
    Some(CpuBackend::new(Arc::new(model), &config, None).unwrap())
}

fn sequences() -> Vec<Sequence> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/reference/smollm2.ref"
    );
    reference::read(&std::fs::read(path).unwrap()).unwrap()
}

/// The first `limit` positions of each sequence.
fn distance(backend: &mut CpuBackend, limit: usize) -> Distance {
    let mut distance = Distance::default();
    let pages: Vec<PageId> = (1..=64).map(PageId::new).collect();
    for sequence in sequences() {
        let len = sequence.tokens.len().min(limit);
        let row = KvRow {
            first_pos: 0,
            len: len as u32,
            pages: &pages,
        };
        let mut logits = Vec::new();
        backend
            .logits(&sequence.tokens[..len], row, &mut logits)
            .unwrap();
        let vocab = logits.len() / len;
        for (want, got) in sequence.rows.iter().zip(logits.chunks_exact(vocab)) {
            distance.add(want, got);
        }
    }
    distance
}

#[test]
fn the_scalar_path_agrees_with_the_float32_reference() {
    let Some(mut backend) = backend(Isa::Scalar, KvDtype::F32) else {
        return;
    };
    let distance = distance(&mut backend, 24);
    println!("{distance:?}");
    assert_eq!(distance.positions, 120);
    assert_eq!(distance.same_best, distance.positions);
    assert!(distance.logit < 1e-3, "{distance:?}");
}

#[test]
fn the_fast_path_stays_close_to_the_float32_reference() {
    let Some(mut backend) = backend(Isa::detect(), KvDtype::F16) else {
        return;
    };
    let distance = distance(&mut backend, usize::MAX);
    println!("{distance:?}");
    assert!(distance.positions >= 2000);
    let share = distance.same_best as f64 / distance.positions as f64;
    assert!(share > 0.96, "top-1 {share}: {distance:?}");
    let kl = distance.kl / distance.positions as f64;
    assert!(kl < 5e-3, "mean KL {kl}: {distance:?}");
}
