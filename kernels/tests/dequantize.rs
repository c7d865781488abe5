//! Dequantization against values written by the Python package gguf (`fixtures/make_blocks.py`).

use rootstock_kernels::{GgmlType, dequantize};

const FIXTURE: &[u8] = include_bytes!("fixtures/blocks.bin");

#[test]
fn every_type_but_f32_has_its_golden_blocks() {
    let mut rest = FIXTURE;
    let mut seen = Vec::new();
    while !rest.is_empty() {
        let mut word = || {
            let (word, after) = rest.split_first_chunk::<4>().unwrap();
            rest = after;
            u32::from_le_bytes(*word)
        };
        let (id, byte_count, value_count) = (word(), word() as usize, word() as usize);
        let ty = GgmlType::from_id(id).unwrap();
        let (bytes, after) = rest.split_at(byte_count);
        let (values, after) = after.split_at(4 * value_count);
        rest = after;
        let mut found = vec![0.0; value_count];
        dequantize(ty, bytes, &mut found).unwrap();
        let expected = values
            .as_chunks::<4>()
            .0
            .iter()
            .map(|value| f32::from_le_bytes(*value));
        for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
            // The other side may round a scale times a scale first.
            let error = (found - expected).abs();
            assert!(
                error <= 1e-6 * expected.abs(),
                "{} element {at}: {found} {expected}",
                ty.name()
            );
        }
        seen.push(ty);
    }
    let missing: Vec<_> = GgmlType::ALL
        .iter()
        .filter(|ty| !seen.contains(ty))
        .collect();
    assert_eq!(missing, [&GgmlType::F32]);
}
