//! Weights of tests: values rounded to a type of a file, as bytes and as they come back.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::wildcard_enum_match_arm,
    reason = "shared by test binaries"
)]

use half::{bf16, f16};
use rootstock_kernels::{GgmlType, dequantize};

use super::case::Rng;

/// Values in a plain type of weights: as bytes, and as they are after rounding.
pub fn rounded(values: &[f32], ty: GgmlType) -> (Vec<u8>, Vec<f32>) {
    let bytes: Vec<u8> = match ty {
        GgmlType::F16 => values
            .iter()
            .flat_map(|x| f16::from_f32(*x).to_le_bytes())
            .collect(),
        GgmlType::Bf16 => values
            .iter()
            .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
            .collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    let mut back = vec![0.0; values.len()];
    dequantize(ty, &bytes, &mut back).unwrap();
    (bytes, back)
}

/// Random blocks of a format, whose values are about 1: as bytes, and as they are.
pub fn random_blocks(rng: &mut Rng, count: usize, ty: GgmlType) -> (Vec<u8>, Vec<f32>) {
    let mut bytes: Vec<u8> = (0..ty.row_bytes(count).unwrap())
        .map(|_| rng.next() as u8)
        .collect();
    // Where the halves of a block are, and what they are about.
    let (halves, size): (&[usize], f32) = match ty {
        GgmlType::Q4_0 => (&[0], 0.2),
        GgmlType::Q4_1 => (&[0, 2], 0.1),
        GgmlType::Q5_0 => (&[0], 0.1),
        GgmlType::Q5_1 => (&[0, 2], 0.05),
        GgmlType::Q8_0 => (&[0], 0.015),
        GgmlType::Q4K => (&[0, 2], 0.003),
        GgmlType::Q5K => (&[0, 2], 0.0015),
        GgmlType::Iq4Nl => (&[0], 0.015),
        GgmlType::Q6K => (&[208], 0.0005),
        _ => (&[], 0.0),
    };
    let block = ty.row_bytes(ty.block_len()).unwrap();
    for block in bytes.chunks_mut(block) {
        for at in halves {
            let half = f16::from_f32(size * rng.normal());
            block[*at..*at + 2].copy_from_slice(&half.to_le_bytes());
        }
    }
    let mut values = vec![0.0; count];
    dequantize(ty, &bytes, &mut values).unwrap();
    (bytes, values)
}
