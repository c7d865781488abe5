//! Weights of tests: values rounded to a type of a file, as bytes and as they come back.
#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "shared by test binaries"
)]

use half::{bf16, f16};
use rootstock_kernels::{GgmlType, dequantize};

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
