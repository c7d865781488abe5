//! The default model on the mock driver, once: its logits against those of an independent float32
//! implementation and of the CPU.
//!
//! Without the model or g++ the test prints why it was skipped.
#![expect(
    clippy::cast_possible_truncation,
    reason = "helpers of tests, with small numbers"
)]

#[path = "../../../kernels/tests/cuda/mock.rs"]
mod mock;
#[path = "support/reference.rs"]
mod reference;

use std::sync::Arc;

use mock::{Variant, on_mock};
use reference::Distance;
use rootstock::memory::{KvDtype, PageId};
use rootstock_engine::cpu_backend::{CpuBackend, CpuBackendConfig};
use rootstock_engine::cuda_backend::{CudaBackend, CudaBackendConfig, CudaModel};
use rootstock_engine::gguf::Gguf;
use rootstock_engine::kernels::{Isa, KvRow, argmax};
use rootstock_engine::model::Model;
use rootstock_engine::model_source::{ModelSpec, resolve};
use rootstock_kernels::cuda::{Device, KvFormat, Numerics};

/// What the model needs.
const SMOLLM2: Variant = Variant {
    head_dims: &[64],
    kv_types: &[1],
    sanitized: false,
    fault: None,
};

/// Tokens of the prompt: few, because the emulation takes seconds for each.
const TOKENS: usize = 16;

/// Largest difference of a logit from float32, with weights and pages of half precision.
const BOUND: f32 = 0.1;

#[test]
fn logits_of_the_default_model_are_within_a_tenth_of_float32() {
    let path = match resolve(&ModelSpec::Auto, &mut |_| {}) {
        Ok(model) => model.path,
        Err(error) => {
            println!("skipped: no model ({error})");
            return;
        }
    };
    if !on_mock(
        "logits_of_the_default_model_are_within_a_tenth_of_float32",
        &SMOLLM2,
    ) {
        return;
    }
    let file = Gguf::open(&path).unwrap();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference");
    let stored = std::fs::read(format!("{folder}/smollm2.ref")).unwrap();
    let sequences = reference::read(&stored).unwrap();
    let sequence = &sequences[0];
    let tokens = &sequence.tokens[..TOKENS];
    let pages = [PageId::new(2)];
    let row = || KvRow {
        first_pos: 0,
        len: TOKENS as u32,
        pages: &pages,
    };

    let device = Device::open(0).unwrap();
    let model = CudaModel::load(&file, &device, Some(64), None).unwrap();
    let config = CudaBackendConfig {
        pages: 4,
        kv_format: KvFormat::F16,
        numerics: Numerics::Fast,
        ..CudaBackendConfig::default()
    };
    let mut there = Vec::new();
    let mut cuda = CudaBackend::new(model, &config, None).unwrap();
    cuda.logits(tokens, row(), &mut there).unwrap();
    drop(cuda);

    let config = CpuBackendConfig {
        pages: 4,
        kv_dtype: KvDtype::F16,
        ..CpuBackendConfig::default()
    };
    let model = Model::load(&file, Isa::detect(), config.threads).unwrap();
    let mut cpu = CpuBackend::new(Arc::new(model), &config, None).unwrap();
    let mut here = Vec::new();
    cpu.logits(tokens, row(), &mut here).unwrap();

    let vocab = there.len() / TOKENS;
    let mut distance = Distance::default();
    let (mut same, mut most) = (0, 0.0_f32);
    for (want, (cuda, cpu)) in sequence
        .rows
        .iter()
        .zip(there.chunks_exact(vocab).zip(here.chunks_exact(vocab)))
    {
        distance.add(want, cuda);
        same += usize::from(argmax(cuda) == argmax(cpu));
        for (a, b) in cuda.iter().zip(cpu) {
            most = most.max((a - b).abs());
        }
    }
    println!(
        "\n    of {TOKENS} positions {} have float32's best token, {same} the CPU's; logits differ \
         by {:.1e} from float32's best, by {most:.1e} from the CPU's",
        distance.same_best, distance.logit
    );
    assert_eq!(distance.positions, TOKENS);
    assert_eq!(distance.same_best, TOKENS);
    assert!(distance.logit <= BOUND, "{distance:?}");
    // The CPU rounds its activations to 8 bits.
    assert!(same + 1 >= TOKENS, "{same}");
}
