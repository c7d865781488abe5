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
    /// 32 weights `d * (q - 16)`, `q` of 5 bits; 22 bytes.
    Q5_0,
    /// 32 weights `d * q + m`, `q` of 5 bits; 24 bytes.
    Q5_1,
    /// 32 weights `d * q`, `q` of 8 bits, signed; 34 bytes.
    Q8_0,
    /// 256 weights in 8 parts `d * s * q - m * t`, `q` of 4 bits, `s` and `t` of 6; 144 bytes.
    Q4K,
    /// 256 weights as in Q4_K with `q` of 5 bits; 176 bytes.
    Q5K,
    /// 256 weights in 16 parts `d * s * (q - 32)`, `q` of 6 bits, `s` of 8, signed; 210 bytes.
    Q6K,
    /// 32 weights `d * t[q]`, `q` of 4 bits into a fixed table; 18 bytes.
    Iq4Nl,
}

/// The values of [`GgmlType::Iq4Nl`].
pub(crate) const IQ4_NL: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

impl GgmlType {
    /// Every type the kernels read.
    pub const ALL: [Self; 12] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
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
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::Iq4Nl => 20,
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
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Iq4Nl => "IQ4_NL",
        }
    }

    /// Elements of a block; 1 for the float types.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Iq4Nl => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
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
        GgmlType::Q5_0 => scaled(ty, block, out, |(d, _), q| d * (q - 16.0)),
        GgmlType::Q6K => scaled(ty, block, out, |(d, _), q| d * (q - 32.0)),
        GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => {
            scaled(ty, block, out, |(d, m), q| d * q + m);
        }
        GgmlType::Q8_0 => {
            let d = f16_at(block, 0);
            for (out, &q) in out.iter_mut().zip(&block[2..]) {
                *out = d * f32::from(q.cast_signed());
            }
        }
        GgmlType::Iq4Nl => {
            let d = f16_at(block, 0);
            nibbles(&block[2..], out, |q| d * f32::from(IQ4_NL[usize::from(q)]));
        }
    }
}

/// The integers of one block of a type whose weights are not floats, as stored: without the
/// offset of Q5_0 and Q6_K.
pub(crate) fn integers(ty: GgmlType, block: &[u8], out: &mut [u8]) {
    match ty {
        GgmlType::Q5_0 => five_bits(&block[2..], out),
        GgmlType::Q5_1 => five_bits(&block[4..], out),
        GgmlType::Q4K => eight_parts(None, &block[16..], out),
        GgmlType::Q5K => eight_parts(Some(&block[16..48]), &block[48..], out),
        GgmlType::Q6K => six_bits(block, out),
        GgmlType::F32
        | GgmlType::F16
        | GgmlType::Bf16
        | GgmlType::Q4_0
        | GgmlType::Q4_1
        | GgmlType::Q8_0
        | GgmlType::Iq4Nl => unreachable!("used as in the file"),
    }
}

/// Factor and addend of the integers of part `part` of a block, 16 elements long.
pub(crate) fn part_scale(ty: GgmlType, block: &[u8], part: usize) -> (f32, f32) {
    match ty {
        GgmlType::Q5_0 => {
            let d = f16_at(block, 0);
            (d, -16.0 * d)
        }
        GgmlType::Q4K | GgmlType::Q5K => {
            let (scale, minimum) = part_scales(&block[4..16], part / 2);
            let (d, m) = (f16_at(block, 0), f16_at(block, 2));
            (d * f32::from(scale), -(m * f32::from(minimum)))
        }
        GgmlType::Q6K => {
            let d = f16_at(block, 208) * f32::from(block[192 + part].cast_signed());
            (d, -32.0 * d)
        }
        GgmlType::F32
        | GgmlType::F16
        | GgmlType::Bf16
        | GgmlType::Q4_0
        | GgmlType::Q4_1
        | GgmlType::Q5_1
        | GgmlType::Q8_0
        | GgmlType::Iq4Nl => (f16_at(block, 0), f16_at(block, 2)),
    }
}

/// Values of a block from its integers, 16 of which share factor and addend.
fn scaled(ty: GgmlType, block: &[u8], out: &mut [f32], value: impl Fn((f32, f32), f32) -> f32) {
    let mut q = [0; 256];
    let q = &mut q[..out.len()];
    integers(ty, block, q);
    for (part, (out, q)) in out.chunks_exact_mut(16).zip(q.chunks_exact(16)).enumerate() {
        let scale = part_scale(ty, block, part);
        for (out, q) in out.iter_mut().zip(q) {
            *out = value(scale, f32::from(*q));
        }
    }
}

/// 32 fifth bits, then 16 bytes of nibbles.
fn five_bits(packed: &[u8], out: &mut [u8]) {
    let bits = u32::from_le_bytes([packed[0], packed[1], packed[2], packed[3]]);
    for (at, out) in out.iter_mut().enumerate() {
        let byte = packed[4 + at % 16];
        let low = if at < 16 { byte & 15 } else { byte >> 4 };
        *out = low | ((bits >> at & 1) as u8) << 4;
    }
}

/// Q4_K and Q5_K: parts of 32, two of which share 32 bytes of nibbles; bit `part` of `fifths[i]`
/// is the fifth bit of a part's element `i`.
fn eight_parts(fifths: Option<&[u8]>, packed: &[u8], out: &mut [u8]) {
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        for (at, (out, byte)) in out.iter_mut().zip(&packed[part / 2 * 32..]).enumerate() {
            let low = if part % 2 == 0 { byte & 15 } else { byte >> 4 };
            *out = low | fifths.map_or(0, |fifths| (fifths[at] >> part & 1) << 4);
        }
    }
}

/// Scale and minimum of a part, 6 bits each: the last 4 parts keep their 2 high bits in the
/// bytes of the first 4.
fn part_scales(packed: &[u8], part: usize) -> (u8, u8) {
    if part < 4 {
        (packed[part] & 63, packed[part + 4] & 63)
    } else {
        let both = packed[part + 4];
        (
            both & 15 | packed[part - 4] >> 6 << 4,
            both >> 4 | packed[part] >> 6 << 4,
        )
    }
}

/// Q6_K: 128 bytes of low nibbles, 64 of high pairs; then 16 scales, and the scale of all.
fn six_bits(block: &[u8], out: &mut [u8]) {
    let (lows, rest) = block.split_at(128);
    for (at, out) in out.iter_mut().enumerate() {
        // Halves of 128 elements are 4 runs of 32.
        let (half, run, i) = (at / 128, at % 128 / 32, at % 32);
        let byte = lows[half * 64 + run % 2 * 32 + i];
        let low = if run < 2 { byte & 15 } else { byte >> 4 };
        *out = low | (rest[half * 32 + i] >> (2 * run) & 3) << 4;
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
