//! GGML tensor types: block shapes, and dequantization as the truth the kernels are held to.
//!
//! A quantized row is a run of blocks; a block has a scale `d` (f16), for some types a minimum
//! `m`, and small integers `q`. Low nibbles of a 4-bit block of 32 are its first 16 elements, high
//! nibbles the last 16. Source: the GGUF format; written from its description.

use half::{bf16, f16};

use super::error::{KernelError, check_len};

/// Element type of a weight matrix, numbered as in GGUF files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GgmlType {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE floats.
    F16,
    /// 16-bit brain floats.
    Bf16,
    /// 32 weights `d * (q - 8)`, `q` of 4 bits; 18 bytes.
    Q4_0,
    /// 32 weights `d * q + m`, `q` of 4 bits; 20 bytes.
    Q4_1,
    /// 32 weights `d * q`, `q` of 8 bits, signed; 34 bytes.
    Q8_0,
}

impl GgmlType {
    /// Every type the kernels read.
    pub const ALL: [Self; 6] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q8_0,
    ];

    /// The type with this number in a GGUF file.
    ///
    /// # Errors
    /// [`KernelError::UnsupportedType`] for types that no kernel reads.
    pub fn from_id(id: u32) -> Result<Self, KernelError> {
        Self::ALL
            .into_iter()
            .find(|ty| ty.id() == id)
            .ok_or(KernelError::UnsupportedType { id })
    }

    /// The type's number in a GGUF file.
    pub const fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q8_0 => 8,
            Self::Bf16 => 30,
        }
    }

    /// The name GGUF tools print.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q8_0 => "Q8_0",
        }
    }

    /// Elements of a block; 1 for the float types.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 => 32,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
        }
    }

    /// Bytes of a row of `cols` elements.
    ///
    /// # Errors
    /// [`KernelError::RowNotBlocks`] when `cols` is no multiple of the block length.
    pub fn row_bytes(self, cols: usize) -> Result<usize, KernelError> {
        if !cols.is_multiple_of(self.block_len()) {
            return Err(KernelError::RowNotBlocks {
                ggml_type: self.name(),
                cols,
                block_len: self.block_len(),
            });
        }
        super::error::checked_area("row bytes", cols / self.block_len(), self.block_bytes())
    }
}

/// Writes the values of whole blocks as 32-bit floats.
///
/// # Errors
/// A length of `out` that is not whole blocks, or bytes that do not match it.
pub fn dequantize(ty: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    check_len("bytes to dequantize", bytes.len(), ty.row_bytes(out.len())?)?;
    let blocks = bytes.chunks_exact(ty.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(ty.block_len())) {
        dequantize_block(ty, block, out);
    }
    Ok(())
}

/// One block; the lengths are right by construction of the chunks.
fn dequantize_block(ty: GgmlType, block: &[u8], out: &mut [f32]) {
    match ty {
        GgmlType::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
        GgmlType::F16 => out[0] = f16_at(block, 0),
        GgmlType::Bf16 => out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
        GgmlType::Q4_0 => {
            let d = f16_at(block, 0);
            nibbles(&block[2..], out, |q| d * (f32::from(q) - 8.0));
        }
        GgmlType::Q4_1 => {
            let (d, m) = (f16_at(block, 0), f16_at(block, 2));
            nibbles(&block[4..], out, |q| d * f32::from(q) + m);
        }
        GgmlType::Q8_0 => {
            let d = f16_at(block, 0);
            for (out, &q) in out.iter_mut().zip(&block[2..]) {
                *out = d * f32::from(q.cast_signed());
            }
        }
    }
}

/// The 16-bit float at a byte offset.
fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// 16 bytes of nibbles to 32 values, low nibbles first.
fn nibbles(packed: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for ((&byte, low), high) in packed.iter().zip(low).zip(high) {
        *low = value(byte & 15);
        *high = value(byte >> 4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_and_unknown_ones_are_refused_by_number() {
        for ty in GgmlType::ALL {
            assert_eq!(GgmlType::from_id(ty.id()).unwrap(), ty);
        }
        assert!(GgmlType::from_id(9).unwrap_err().to_string().contains('9'));
    }

    #[test]
    fn rows_that_are_not_whole_blocks_are_refused_with_the_numbers() {
        let error = GgmlType::Q4_1.row_bytes(577).unwrap_err().to_string();
        assert!(error.contains("577") && error.contains("32") && error.contains("Q4_1"));
        assert_eq!(GgmlType::Q4_1.row_bytes(576).unwrap(), 360);
    }

    #[test]
    fn a_q4_1_block_by_hand() {
        let mut block = vec![];
        block.extend(f16::from_f32(0.5).to_le_bytes());
        block.extend(f16::from_f32(-1.0).to_le_bytes());
        block.extend((0..16).map(|i| i | ((15 - i) << 4)));
        let mut out = [0.0; 32];
        dequantize(GgmlType::Q4_1, &block, &mut out).unwrap();
        assert_eq!(out[3], 0.5);
        assert_eq!(out[16], 6.5);
        assert_eq!(out[31], -1.0);
    }

    #[test]
    fn bytes_of_another_length_are_refused() {
        assert!(dequantize(GgmlType::Q8_0, &[0; 33], &mut [0.0; 32]).is_err());
    }
}
