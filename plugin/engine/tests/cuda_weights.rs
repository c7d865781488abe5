//! Quantized weights on the mock driver: they stay in the file's blocks, and the text is that of
//! the same values as floats.
#![expect(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "helpers of tests, with small numbers"
)]

#[path = "../../../kernels/tests/cuda/mock.rs"]
mod mock;
#[path = "support/tiny.rs"]
mod tiny;

use half::f16;
use mock::{Variant, on_mock};
use rootstock::Backend;
use rootstock::memory::{PageId, StepId};
use rootstock_engine::cuda_backend::{CudaBackend, CudaBackendConfig, CudaModel};
use rootstock_engine::gguf::{Gguf, TensorType};
use rootstock_kernels::cuda::{Device, KvFormat, Numerics};
use rootstock_kernels::{GgmlType, KvRow, dequantize};
use tiny::{Encoded, Part, VOCAB, plan};

const ENGINE: Variant = Variant {
    head_dims: &[16, 32],
    kv_types: &[0, 1, 2, 3, 4],
    sanitized: false,
    fault: None,
};

/// Formats with blocks as short as the tiny models' rows.
const FORMATS: [GgmlType; 4] = [
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_1,
    GgmlType::Q8_0,
];

/// One block of 32 values, each rounded to the nearest that the format has.
fn block(values: &[f32], ty: GgmlType) -> Vec<u8> {
    let most = values.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (scale, offset, levels) = match ty {
        GgmlType::Q4_0 => (most / 7.0, -8.0 * most / 7.0, 15.0),
        GgmlType::Q4_1 => ((high - low) / 15.0, low, 15.0),
        GgmlType::Q5_1 => ((high - low) / 31.0, low, 31.0),
        _ => (most / 127.0, -128.0 * most / 127.0, 255.0),
    };
    let small: Vec<u8> = values
        .iter()
        .map(|x| ((x - offset) / scale).round().clamp(0.0, levels) as u8)
        .collect();
    let mut out = f16::from_f32(scale).to_le_bytes().to_vec();
    match ty {
        GgmlType::Q8_0 => out.extend(small.iter().map(|q| q ^ 0x80)),
        _ => {
            if ty != GgmlType::Q4_0 {
                out.extend(f16::from_f32(offset).to_le_bytes());
            }
            if ty == GgmlType::Q5_1 {
                let fifths = small.iter().rev();
                let fifths = fifths.fold(0, |bits: u32, q| bits << 1 | u32::from(q >> 4));
                out.extend(fifths.to_le_bytes());
            }
            let (first, second) = small.split_at(16);
            let pairs = first.iter().zip(second);
            out.extend(pairs.map(|(low, high)| low & 15 | high << 4));
        }
    }
    out
}

fn blocks(values: &[f32], ty: GgmlType) -> Vec<u8> {
    values
        .chunks(32)
        .flat_map(|values| block(values, ty))
        .collect()
}

fn on_cuda(
    family: &str,
    matrix: &dyn Fn(&[f32]) -> Encoded,
    numerics: Numerics,
) -> (CudaBackend, u64) {
    let file = tiny::writer_of(family, &[], matrix).to_bytes();
    let device = Device::open(0).unwrap();
    let model = CudaModel::load(&Gguf::from_bytes(file).unwrap(), &device, None, None).unwrap();
    let bytes = model.weight_bytes();
    let config = CudaBackendConfig {
        pages: 64,
        kv_format: KvFormat::F32,
        numerics,
        ..CudaBackendConfig::default()
    };
    (CudaBackend::new(model, &config, None).unwrap(), bytes)
}

/// Six greedy tokens after a prompt, and the logits of the prompt.
fn run(cuda: &mut CudaBackend) -> (Vec<u32>, Vec<f32>) {
    let prompt: Vec<u32> = (0..21)
        .map(|i| (i * 31 + i * i + 9) % VOCAB as u32)
        .collect();
    let pages = [3, 7];
    let mut text: Vec<u32> = Vec::new();
    for id in 0..6 {
        let last: Vec<u32> = text.last().copied().into_iter().collect();
        let part = match id {
            0 => Part::new(&prompt, 0, &pages),
            _ => Part::new(&last, 20 + id, &pages),
        };
        cuda.launch(plan(u64::from(id), &[part.greedy(id)]))
            .unwrap();
        let output = cuda.wait(StepId(u64::from(id))).unwrap();
        text.extend_from_slice(&output.rows[0].accepted);
    }
    let pages = pages.map(PageId::new);
    let row = KvRow {
        first_pos: 0,
        len: 21,
        pages: &pages,
    };
    let mut logits = Vec::new();
    cuda.logits(&prompt, row, &mut logits).unwrap();
    (text, logits)
}

#[test]
fn weights_in_blocks_give_the_text_of_their_values() {
    if !on_mock("weights_in_blocks_give_the_text_of_their_values", &ENGINE) {
        return;
    }
    println!();
    for family in tiny::FAMILIES {
        for ty in FORMATS {
            let file_type = TensorType::from_id(ty.id()).unwrap();
            let quantized = |values: &[f32]| (file_type, blocks(values, ty));
            let floats = |values: &[f32]| {
                let mut back = vec![0.0; values.len()];
                dequantize(ty, &blocks(values, ty), &mut back).unwrap();
                let bytes = back.iter().flat_map(|x| x.to_le_bytes());
                (TensorType::F32, bytes.collect())
            };
            let (mut wide, wide_bytes) = on_cuda(family, &floats, Numerics::Invariant);
            let (text, logits) = run(&mut wide);
            for (numerics, bound) in [(Numerics::Invariant, 1e-4), (Numerics::Fast, 0.1)] {
                let (mut narrow, bytes) = on_cuda(family, &quantized, numerics);
                let block = ty.row_bytes(32).unwrap() as u64;
                assert_eq!(bytes, wide_bytes / 128 * block, "{family} {ty:?}");
                let (found, there) = run(&mut narrow);
                assert_eq!(found, text, "{family} {ty:?} {numerics:?}");
                let pairs = logits.iter().zip(&there);
                let off = pairs.fold(0.0, |most: f32, (a, b)| {
                    let d = (a - b).abs();
                    if d <= most { most } else { d }
                });
                println!("    {family} {ty:?} {numerics:?}: largest logit difference {off:.1e}");
                assert!(off <= bound, "{family} {ty:?} {numerics:?}: {off}");
            }
        }
    }
}
