//! Weight matrices, checked and repacked once at load.

use super::error::{KernelError, check_len, checked_area};
use super::forms::Form;
use super::ggml::{GgmlType, dequantize};
use super::huge::WeightRoom;
use super::isa::Isa;
use super::lanes::{Kernel, Lanes};
use super::tiles::{TileShape, Tiles};

/// A weight matrix `[rows][cols]` in the form the kernels of one instruction set read.
#[derive(Debug)]
pub struct PackedMatrix {
    ggml_type: GgmlType,
    rows: usize,
    cols: usize,
    isa: Isa,
    store: Store,
}

/// How the weights lie in memory.
#[derive(Debug)]
pub(crate) enum Store {
    /// Rows as in the file: the scalar path.
    Rows(Box<[u8]>),
    /// Tiles of the vector paths.
    Tiles(Tiles),
}

impl PackedMatrix {
    /// Checks the shape against the bytes and repacks them for `isa`, in memory of their own.
    ///
    /// # Errors
    /// As [`PackedMatrix::pack_in`].
    pub fn pack(
        ggml_type: GgmlType,
        rows: usize,
        cols: usize,
        bytes: &[u8],
        isa: Isa,
    ) -> Result<Self, KernelError> {
        Self::pack_in(&WeightRoom::default(), (ggml_type, rows, cols), bytes, isa)
    }

    /// The same as a part of `room`, which the matrices of a model share.
    ///
    /// # Errors
    /// Rows that are not whole blocks, or bytes that do not match the shape.
    ///
    /// # Cost
    /// One pass over the bytes and an allocation of about their size.
    pub fn pack_in(
        room: &WeightRoom,
        (ggml_type, rows, cols): (GgmlType, usize, usize),
        bytes: &[u8],
        isa: Isa,
    ) -> Result<Self, KernelError> {
        if rows == 0 || cols == 0 {
            return Err(KernelError::EmptyMatrix { rows, cols });
        }
        let wanted = checked_area("matrix", rows, ggml_type.row_bytes(cols)?)?;
        if bytes.len() != wanted {
            return Err(KernelError::MatrixBytes {
                ggml_type: ggml_type.name(),
                rows,
                cols,
                wanted,
                found: bytes.len(),
            });
        }
        let store = match isa.tile_shape(ggml_type) {
            None => Store::Rows(bytes.into()),
            Some(shape) if shape.form.is_of_file(ggml_type) => {
                let row_bytes = ggml_type.row_bytes(cols)?;
                Store::Tiles(Tiles::pack(shape, row_bytes, bytes, room))
            }
            Some(shape) => {
                let row_bytes = cols / shape.form.block_len() * shape.form.block_bytes();
                let bytes = Form::convert(ggml_type, bytes)?;
                Store::Tiles(Tiles::pack(shape, row_bytes, &bytes, room))
            }
        };
        Ok(Self {
            ggml_type,
            rows,
            cols,
            isa,
            store,
        })
    }

    /// Rows: the width of the output.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns: the width of the input.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The weights' type in the file.
    pub fn ggml_type(&self) -> GgmlType {
        self.ggml_type
    }

    /// The instruction set it was packed for.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        match &self.store {
            Store::Rows(bytes) => bytes.len(),
            Store::Tiles(tiles) => tiles.bytes(),
        }
    }

    /// The tiles of the vector paths.
    pub(crate) fn tiles(&self) -> Option<&Tiles> {
        match &self.store {
            Store::Rows(_) => None,
            Store::Tiles(tiles) => Some(tiles),
        }
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Writes one row as floats: the file's values, on vector paths with scales rounded to 16 bits
    /// for the types that are repacked in another form.
    ///
    /// # Errors
    /// A row outside the matrix, or `out` of another length than the columns.
    pub fn embed_row(&self, row: usize, out: &mut [f32]) -> Result<(), KernelError> {
        if row >= self.rows {
            return Err(KernelError::RowOutOfRange {
                row,
                rows: self.rows,
            });
        }
        check_len("embedding row", out.len(), self.cols)?;
        match &self.store {
            Store::Rows(bytes) => {
                let row_bytes = self.ggml_type.row_bytes(self.cols)?;
                dequantize(self.ggml_type, &bytes[row * row_bytes..][..row_bytes], out)
            }
            Store::Tiles(tiles) => {
                let form = tiles.shape().form;
                let block_len = form.block_len();
                let mut result = Ok(());
                tiles.for_blocks(row, |index, block| {
                    let out = &mut out[index * block_len..][..block_len];
                    result = form.values(block, out);
                });
                result
            }
        }
    }
}

impl Isa {
    /// How this instruction set's kernels want the weights; none: as in the file.
    fn tile_shape(self, ggml_type: GgmlType) -> Option<TileShape> {
        struct Shape(GgmlType);
        impl Kernel for Shape {
            type Output = Option<TileShape>;

            fn scalar(self) -> Option<TileShape> {
                None
            }

            #[inline(always)]
            fn simd<L: Lanes>(self, _: L) -> Option<TileShape> {
                Some(TileShape {
                    form: Form::of(self.0),
                    height: L::ROWS,
                    plus_128: L::PLUS_128,
                })
            }
        }
        self.run(Shape(ggml_type))
    }
}
