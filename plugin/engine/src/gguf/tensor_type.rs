//! Element types of GGUF tensors with the size of their blocks.
//!
//! Source of the numbers: the enum `ggml_type` and the block structs of ggml, as PyPI `gguf` 0.19
//! lists them. All of them are known here so that a file with any of them can be measured and
//! checked; which of them can be computed with is the kernels' business.

use std::fmt;

/// How the elements of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorType(&'static Entry);

#[derive(Debug, PartialEq, Eq)]
struct Entry {
    id: u32,
    name: &'static str,
    block_values: u32,
    block_bytes: u32,
}

const fn entry(id: u32, name: &'static str, block_values: u32, block_bytes: u32) -> Entry {
    Entry {
        id,
        name,
        block_values,
        block_bytes,
    }
}

/// Sorted by id.
static ENTRIES: [Entry; 34] = [
    entry(0, "F32", 1, 4),
    entry(1, "F16", 1, 2),
    entry(2, "Q4_0", 32, 18),
    entry(3, "Q4_1", 32, 20),
    entry(6, "Q5_0", 32, 22),
    entry(7, "Q5_1", 32, 24),
    entry(8, "Q8_0", 32, 34),
    entry(9, "Q8_1", 32, 40),
    entry(10, "Q2_K", 256, 84),
    entry(11, "Q3_K", 256, 110),
    entry(12, "Q4_K", 256, 144),
    entry(13, "Q5_K", 256, 176),
    entry(14, "Q6_K", 256, 210),
    entry(15, "Q8_K", 256, 292),
    entry(16, "IQ2_XXS", 256, 66),
    entry(17, "IQ2_XS", 256, 74),
    entry(18, "IQ3_XXS", 256, 98),
    entry(19, "IQ1_S", 256, 50),
    entry(20, "IQ4_NL", 32, 18),
    entry(21, "IQ3_S", 256, 110),
    entry(22, "IQ2_S", 256, 82),
    entry(23, "IQ4_XS", 256, 136),
    entry(24, "I8", 1, 1),
    entry(25, "I16", 1, 2),
    entry(26, "I32", 1, 4),
    entry(27, "I64", 1, 8),
    entry(28, "F64", 1, 8),
    entry(29, "IQ1_M", 256, 56),
    entry(30, "BF16", 1, 2),
    entry(34, "TQ1_0", 256, 54),
    entry(35, "TQ2_0", 256, 66),
    entry(39, "MXFP4", 32, 17),
    entry(40, "NVFP4", 64, 36),
    entry(41, "Q1_0", 128, 18),
];

impl TensorType {
    /// 32-bit floats.
    pub const F32: Self = Self(&ENTRIES[0]);
    /// 16-bit IEEE floats.
    pub const F16: Self = Self(&ENTRIES[1]);
    /// Blocks of 32: one f16 scale, 4-bit values.
    pub const Q4_0: Self = Self(&ENTRIES[2]);
    /// Blocks of 32: f16 scale and minimum, 4-bit values.
    pub const Q4_1: Self = Self(&ENTRIES[3]);
    /// Blocks of 32: one f16 scale, 8-bit values.
    pub const Q8_0: Self = Self(&ENTRIES[6]);
    /// Upper halves of 32-bit floats.
    pub const BF16: Self = Self(&ENTRIES[28]);

    /// The type with this number in the file format, if there is one.
    #[must_use]
    pub fn from_id(id: u32) -> Option<Self> {
        let at = ENTRIES.binary_search_by_key(&id, |entry| entry.id).ok()?;
        ENTRIES.get(at).map(Self)
    }

    /// The number in the file format (`ggml_type`).
    #[must_use]
    pub fn id(self) -> u32 {
        self.0.id
    }

    /// The name that ggml gives it, such as `Q4_1`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Elements in a block; 1 for plain types.
    #[must_use]
    pub fn block_values(self) -> u64 {
        u64::from(self.0.block_values)
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> u64 {
        u64::from(self.0.block_bytes)
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_constants_are_the_entries_they_claim_to_be() {
        let named = [
            (TensorType::F32, 0, "F32"),
            (TensorType::F16, 1, "F16"),
            (TensorType::Q4_0, 2, "Q4_0"),
            (TensorType::Q4_1, 3, "Q4_1"),
            (TensorType::Q8_0, 8, "Q8_0"),
            (TensorType::BF16, 30, "BF16"),
        ];
        for (ty, id, name) in named {
            assert_eq!((ty.id(), ty.name()), (id, name));
        }
    }

    #[test]
    fn ids_are_sorted_so_that_the_search_finds_each() {
        for entry in &ENTRIES {
            assert_eq!(
                TensorType::from_id(entry.id).map(TensorType::name),
                Some(entry.name)
            );
        }
        assert_eq!(TensorType::from_id(4), None);
        assert_eq!(TensorType::from_id(u32::MAX), None);
    }
}
