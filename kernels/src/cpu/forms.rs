//! The forms in which weights stand in tiles: blocks of 32 columns with 16-bit scales, for which
//! products have a kernel each.
//!
//! Most file types are a form of their own. The others keep their integers and get their scales
//! in 16 bits: the parts of Q4_K become blocks like those of Q4_1, those of Q5_K and Q5_0 blocks
//! of [`Form::Q5`], those of Q6_K blocks of [`Form::Q6`]. The file has 6 or 8 bits of scale times
//! a 16-bit one, so a scale is rounded to 11 bits, far below the step of the integers.

use half::f16;

use super::error::KernelError;
use super::ggml::{GgmlType, dequantize, integers, part_scale};

/// How a block of weights stands in a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// A float.
    F32,
    /// A 16-bit float.
    F16,
    /// A brain float.
    Bf16,
    /// As in the file.
    Q4_0,
    /// As in the file.
    Q4_1,
    /// Scale, minimum, 32 fifth bits, 32 nibbles: `d * q + m`. The fifth bit of element
    /// `4 * g + i` is bit `8 * i + g`, so that one shift brings those of 4 elements beside their
    /// nibbles.
    Q5,
    /// Two scales, for 16 elements each, and 32 bytes: `d * (q - 32)`.
    Q6,
    /// As in the file.
    Q8_0,
    /// As in the file.
    Iq4Nl,
}

impl Form {
    /// Every form.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 9] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5,
        Self::Q6,
        Self::Q8_0,
        Self::Iq4Nl,
    ];

    /// The form of weights of a type.
    pub(crate) const fn of(ty: GgmlType) -> Self {
        match ty {
            GgmlType::F32 => Self::F32,
            GgmlType::F16 => Self::F16,
            GgmlType::Bf16 => Self::Bf16,
            GgmlType::Q4_0 => Self::Q4_0,
            GgmlType::Q4_1 | GgmlType::Q4K => Self::Q4_1,
            GgmlType::Q5_0 | GgmlType::Q5_1 | GgmlType::Q5K => Self::Q5,
            GgmlType::Q6K => Self::Q6,
            GgmlType::Q8_0 => Self::Q8_0,
            GgmlType::Iq4Nl => Self::Iq4Nl,
        }
    }

    /// The file type whose blocks look the same.
    const fn file_type(self) -> Option<GgmlType> {
        match self {
            Self::F32 => Some(GgmlType::F32),
            Self::F16 => Some(GgmlType::F16),
            Self::Bf16 => Some(GgmlType::Bf16),
            Self::Q4_0 => Some(GgmlType::Q4_0),
            Self::Q4_1 => Some(GgmlType::Q4_1),
            Self::Q8_0 => Some(GgmlType::Q8_0),
            Self::Iq4Nl => Some(GgmlType::Iq4Nl),
            Self::Q5 | Self::Q6 => None,
        }
    }

    /// Elements of a block.
    pub(crate) const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5 | Self::Q6 | Self::Q8_0 | Self::Iq4Nl => 32,
        }
    }

    /// Bytes of a block.
    pub(crate) const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q4_1 => 20,
            Self::Q5 => 24,
            Self::Q8_0 => 34,
            Self::Q6 => 36,
        }
    }

    /// Numbers of 2 bytes at a block's start.
    pub(crate) const fn scalars(self) -> usize {
        match self {
            Self::F32 => 0,
            Self::F16 | Self::Bf16 | Self::Q4_0 | Self::Q8_0 | Self::Iq4Nl => 1,
            Self::Q4_1 | Self::Q5 | Self::Q6 => 2,
        }
    }

    /// Whether blocks of a type are blocks of this form as they are.
    pub(crate) fn is_of_file(self, ty: GgmlType) -> bool {
        self.file_type() == Some(ty)
    }

    /// Blocks of a type as blocks of its form.
    ///
    /// # Errors
    /// Bytes that are not whole blocks.
    pub(crate) fn convert(ty: GgmlType, bytes: &[u8]) -> Result<Vec<u8>, KernelError> {
        let form = Self::of(ty);
        let blocks = bytes.len() / ty.block_bytes();
        let parts = ty.block_len() / form.block_len();
        let mut out = Vec::with_capacity(blocks * parts * form.block_bytes());
        let mut q = [0; 256];
        for block in bytes.chunks_exact(ty.block_bytes()) {
            let q = &mut q[..ty.block_len()];
            integers(ty, block, q);
            for (part, q) in q.as_chunks::<32>().0.iter().enumerate() {
                form.push(&mut out, q, |half| part_scale(ty, block, 2 * part + half));
            }
        }
        Ok(out)
    }

    /// Appends a block of integers; `scale` gives factor and addend of each half of it.
    fn push(self, out: &mut Vec<u8>, q: &[u8; 32], scale: impl Fn(usize) -> (f32, f32)) {
        let (d, m) = scale(0);
        let second = if self == Self::Q6 { scale(1).0 } else { m };
        out.extend(f16::from_f32(d).to_le_bytes());
        out.extend(f16::from_f32(second).to_le_bytes());
        if self == Self::Q6 {
            out.extend(q);
            return;
        }
        if self == Self::Q5 {
            let bit = |at: usize| u32::from(q[at] >> 4 & 1) << (8 * (at % 4) + at / 4);
            let bits: u32 = (0..32).map(bit).sum();
            out.extend(bits.to_le_bytes());
        }
        out.extend((0..16).map(|at| q[at] & 15 | (q[16 + at] & 15) << 4));
    }

    /// Writes the values of one block.
    ///
    /// # Errors
    /// Bytes or values that are no block.
    pub(crate) fn values(self, block: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
        if let Some(ty) = self.file_type() {
            return dequantize(ty, block, out);
        }
        let scalar = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        let (d, second) = (scalar(0), scalar(2));
        for (at, out) in out.iter_mut().enumerate() {
            *out = if self == Self::Q6 {
                let d = if at < 16 { d } else { second };
                d * (f32::from(block[4 + at]) - 32.0)
            } else {
                let fifth = block[4 + at % 4] >> (at / 4) & 1;
                let byte = block[8 + at % 16];
                let low = if at < 16 { byte & 15 } else { byte >> 4 };
                d * f32::from(low | fifth << 4) + second
            };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_converted_block_says_what_the_file_says(
            ty in prop::sample::select(vec![
                GgmlType::Q4K, GgmlType::Q5_0, GgmlType::Q5_1, GgmlType::Q5K, GgmlType::Q6K,
            ]),
            mut bytes in prop::collection::vec(any::<u8>(), 210),
            d in 1e-4_f32..0.1, m in 1e-4_f32..0.1,
        ) {
            bytes.truncate(ty.block_bytes());
            let at = if ty == GgmlType::Q6K { 208 } else { 0 };
            bytes[at..at + 2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
            if ty != GgmlType::Q6K && ty != GgmlType::Q5_0 {
                bytes[2..4].copy_from_slice(&f16::from_f32(m).to_le_bytes());
            }
            let mut expected = vec![0.0; ty.block_len()];
            dequantize(ty, &bytes, &mut expected).unwrap();
            let form = Form::of(ty);
            let blocks = Form::convert(ty, &bytes).unwrap();
            let mut found = vec![0.0; ty.block_len()];
            for (block, out) in blocks.chunks(form.block_bytes()).zip(found.chunks_mut(32)) {
                form.values(block, out).unwrap();
            }
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let (d, m) = part_scale(ty, &bytes, at / 16);
                // Two scales, each rounded to 11 bits; a small one to the least step of f16.
                let scales = (expected.abs() + 2.0 * m.abs()) / 2048.0;
                let bound = scales + 64.0 * 6e-8 + d.abs() * 1e-5;
                prop_assert!((found - expected).abs() <= bound, "{ty:?} {at}: {found} {expected}");
            }
        }
    }
}
