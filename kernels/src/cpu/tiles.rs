//! Weights repacked into tiles of 8 or 16 rows, so that one vector holds the same column of
//! every row of a tile.
//!
//! ```text
//! tile:  unit, unit, ...                         one unit per block (32 columns; 1 for floats)
//! unit:  scalars [scalar][row] of 2 bytes, then words [word][row] of 4 bytes
//! ```
//!
//! Blocks are those of a [`Form`]. Their bytes keep their values and change their places only:
//! scalars are 16-bit scales (for F16 and BF16 the element itself), words the packed numbers, 4
//! bytes at a time. A 4-bit word `w` holds elements `4w..` in its low and `16 + 4w..` in its high
//! nibbles, as in the file. The last tile is padded with zero rows. Source: the 16-row tiles are
//! our own design; llama.cpp's repacked Q4_0 is akin.

use bytes::BytesMut;

use super::forms::Form;
use super::huge::WeightRoom;

/// The weights of a matrix in tiles.
pub(crate) struct Tiles {
    /// Begins at a cache line.
    bytes: BytesMut,
    shape: TileShape,
    tile_bytes: usize,
    rows: usize,
}

/// How blocks of one form lie in units of one tile height.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TileShape {
    pub(crate) form: Form,
    /// Rows of a tile.
    pub(crate) height: usize,
    /// Signed bytes are stored with 128 added.
    pub(crate) plus_128: bool,
}

impl std::fmt::Debug for Tiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tiles")
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl TileShape {
    /// Bytes of a unit: the blocks of all its rows.
    pub(crate) const fn unit_bytes(self) -> usize {
        self.form.block_bytes() * self.height
    }

    /// Where byte `at` of the block of row `row` lies in a unit.
    const fn place(self, row: usize, at: usize) -> usize {
        let scalar_bytes = 2 * self.form.scalars();
        if at < scalar_bytes {
            (at / 2) * 2 * self.height + row * 2 + at % 2
        } else {
            let at = at - scalar_bytes;
            scalar_bytes * self.height + (at / 4) * 4 * self.height + row * 4 + at % 4
        }
    }

    /// What byte `at` of a block is changed by on its way in and out.
    const fn flip(self, at: usize) -> u8 {
        if matches!(self.form, Form::Q8_0) && self.plus_128 && at >= 2 {
            0x80
        } else {
            0
        }
    }
}

impl Tiles {
    /// Repacks the rows of a matrix, `row_bytes` each, into a part of `room`.
    pub(crate) fn pack(
        shape: TileShape,
        row_bytes: usize,
        bytes: &[u8],
        room: &WeightRoom,
    ) -> Self {
        let block_bytes = shape.form.block_bytes();
        let rows = bytes.len() / row_bytes;
        let tile_bytes = row_bytes * shape.height;
        let tile_count = rows.div_ceil(shape.height);
        let mut out = room.take(tile_count * tile_bytes);
        for (index, row) in bytes.chunks_exact(row_bytes).enumerate() {
            let tile = &mut out[index / shape.height * tile_bytes..][..tile_bytes];
            let units = tile.chunks_exact_mut(shape.unit_bytes());
            for (block, unit) in row.chunks_exact(block_bytes).zip(units) {
                for (at, byte) in block.iter().enumerate() {
                    unit[shape.place(index % shape.height, at)] = byte ^ shape.flip(at);
                }
            }
        }
        Self {
            bytes: out,
            shape,
            tile_bytes,
            rows,
        }
    }

    /// Tiles of the matrix.
    pub(crate) fn count(&self) -> usize {
        self.rows.div_ceil(self.shape.height)
    }

    /// Rows of the matrix.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Whether the product takes 8-bit activations.
    pub(crate) fn quantized(&self) -> bool {
        self.shape.form.block_len() > 1
    }

    /// How the units lie.
    pub(crate) fn shape(&self) -> TileShape {
        self.shape
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes of one tile.
    pub(crate) fn tile(&self, index: usize) -> &[u8] {
        &self.bytes[index * self.tile_bytes..][..self.tile_bytes]
    }

    /// Calls `f` with each block of a row.
    pub(crate) fn for_blocks(&self, row: usize, mut f: impl FnMut(usize, &[u8])) {
        let shape = self.shape;
        let mut block = [0; 64];
        let block = &mut block[..shape.form.block_bytes()];
        let tile = self.tile(row / shape.height);
        for (index, unit) in tile.chunks_exact(shape.unit_bytes()).enumerate() {
            for (at, byte) in block.iter_mut().enumerate() {
                *byte = unit[shape.place(row % shape.height, at)] ^ shape.flip(at);
            }
            f(index, block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn blocks_come_back_as_they_went_in(
            form in prop::sample::select(Form::ALL.to_vec()), tall: bool, plus_128: bool,
            rows in 1_usize..40, blocks in 1_usize..5, seed: u64,
        ) {
            let shape = TileShape { form, height: if tall { 16 } else { 8 }, plus_128 };
            let row_bytes = blocks * form.block_bytes();
            let bytes: Vec<u8> = (0..(rows * row_bytes) as u64)
                .map(|i| (seed.wrapping_add(i).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
                .collect();
            let tiles = Tiles::pack(shape, row_bytes, &bytes, &WeightRoom::default());
            for (row, expected) in bytes.chunks_exact(row_bytes).enumerate() {
                let mut found = Vec::new();
                tiles.for_blocks(row, |_, block| found.extend_from_slice(block));
                prop_assert_eq!(found, expected);
            }
        }
    }

    #[test]
    fn no_two_bytes_of_a_unit_share_a_place() {
        for form in Form::ALL {
            let shape = TileShape {
                form,
                height: 16,
                plus_128: true,
            };
            let mut places: Vec<usize> = (0..16)
                .flat_map(|row| (0..form.block_bytes()).map(move |at| shape.place(row, at)))
                .collect();
            places.sort_unstable();
            assert!(places.into_iter().eq(0..shape.unit_bytes()), "{form:?}");
        }
    }
}
