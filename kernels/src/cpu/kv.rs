//! K and V in the arena: the checked view all kernels go through, and the store of a step's rows.
//!
//! A step stores the K and V of its rows first and attention reads them back in the KV dtype, so
//! a position has the same K and V for the chunk that computed it and for all later ones.

use half::{bf16, f16};
use rootstock_memory::{KvArena, KvDtype, KvLayout, KvSide, KvSlot, LayoutOrder, PageId};

use super::error::{KernelError, check_len, checked_area};
use super::isa::Isa;
use super::lanes::{Kernel, Lanes};

/// Largest head dimension of the kernels.
pub(crate) const HEAD_DIM_MAX: usize = 256;

/// Head dimensions are multiples of this, the width of a logical vector.
pub(crate) const HEAD_DIM_MULTIPLE: usize = 16;

/// The part of a request that a step computes.
#[derive(Clone, Copy, Debug)]
pub struct KvRow<'a> {
    /// Position of its first token.
    pub first_pos: u32,
    /// Tokens of the step.
    pub len: u32,
    /// Page table: position `p` is on `pages[p / page_tokens]`; covers `first_pos + len`.
    pub pages: &'a [PageId],
}

/// All bytes of an arena with their layout, checked against each other.
#[derive(Debug)]
pub struct KvView<'a> {
    bytes: &'a mut [u8],
    layout: KvLayout,
}

/// The arena's elements by type; 16-bit floats as bit patterns.
#[derive(Clone, Copy)]
pub(crate) enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [u16]),
    Bf16(&'a [u16]),
}

impl<'a> KvView<'a> {
    /// A view of the whole arena `bytes`, scratch page included.
    ///
    /// # Errors
    /// A layout the kernels do not read (layer-first; head dimension no multiple of 16 or above
    /// 256), or bytes that are not whole pages or not aligned to the element type.
    pub fn new(bytes: &'a mut [u8], layout: KvLayout) -> Result<Self, KernelError> {
        if layout.order() != LayoutOrder::PageFirst {
            return Err(KernelError::LayoutOrder);
        }
        check_head_dim(layout.head_dim())?;
        let misalignment = bytes.as_ptr() as usize % layout.dtype().bytes() as usize;
        if !bytes.len().is_multiple_of(layout.page_bytes()) || misalignment != 0 {
            return Err(KernelError::ArenaBytes {
                bytes: bytes.len(),
                page_bytes: layout.page_bytes() as u64,
                misalignment,
            });
        }
        Ok(Self { bytes, layout })
    }

    /// A view of an arena.
    ///
    /// # Errors
    /// As [`KvView::new`].
    pub fn of(arena: &'a mut KvArena) -> Result<Self, KernelError> {
        let layout = *arena.layout();
        Self::new(arena.bytes_mut(), layout)
    }

    /// The layout.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Pages, the scratch page included.
    pub fn pages(&self) -> u64 {
        (self.bytes.len() / self.layout.page_bytes()) as u64
    }

    pub(crate) fn elements(&self) -> Elements<'_> {
        match self.layout.dtype() {
            KvDtype::F32 => Elements::F32(bytemuck::cast_slice(self.bytes)),
            KvDtype::F16 => Elements::F16(bytemuck::cast_slice(self.bytes)),
            KvDtype::Bf16 => Elements::Bf16(bytemuck::cast_slice(self.bytes)),
        }
    }

    /// Element offset of the head vector at a position of a row.
    pub(crate) fn offset(&self, row: &KvRow<'_>, at: KvPlace) -> usize {
        offset(&self.layout, row, at)
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// Checks a layer and the page tables of a call; returns the number of tokens.
    pub(crate) fn check(&self, layer: u32, rows: &[KvRow<'_>]) -> Result<usize, KernelError> {
        let layers = self.layout.layers();
        if layer >= layers {
            return Err(KernelError::LayerOutOfRange { layer, layers });
        }
        check_tables(rows, self.layout.page_tokens(), self.pages())
    }
}

/// Element offset of the head vector at a position of a row.
pub(crate) fn offset(layout: &KvLayout, row: &KvRow<'_>, at: KvPlace) -> usize {
    let page_tokens = layout.page_tokens();
    layout.element_offset(KvSlot {
        page: row.pages[(at.position / page_tokens) as usize],
        layer: at.layer,
        side: at.side,
        head: at.head,
        slot: at.position % page_tokens,
    }) as usize
}

/// Checks that page tables cover their rows and name pages below `pages` only; returns the number
/// of tokens.
pub(crate) fn check_tables(
    rows: &[KvRow<'_>],
    page_tokens: u32,
    pages: u64,
) -> Result<usize, KernelError> {
    let mut tokens = 0;
    for (index, row) in rows.iter().enumerate() {
        let positions = u64::from(row.first_pos) + u64::from(row.len);
        let wanted_pages = positions.div_ceil(u64::from(page_tokens));
        if (row.pages.len() as u64) < wanted_pages || positions > u64::from(u32::MAX) {
            return Err(KernelError::PageTableShort {
                row: index,
                positions,
                page_tokens,
                wanted_pages,
                found_pages: row.pages.len(),
            });
        }
        if let Some(page) = row.pages.iter().find(|page| u64::from(page.get()) >= pages) {
            return Err(KernelError::PageOutOfRange {
                page: page.get(),
                pages,
            });
        }
        tokens += row.len as usize;
    }
    Ok(tokens)
}

/// Which head vector of a row.
#[derive(Clone, Copy)]
pub(crate) struct KvPlace {
    pub(crate) position: u32,
    pub(crate) layer: u32,
    pub(crate) side: KvSide,
    pub(crate) head: u32,
}

/// Offsets of one head's vectors at ascending positions of a row; looks at the page table once
/// a page.
pub(crate) struct KvWalk<'a> {
    view: &'a KvView<'a>,
    row: &'a KvRow<'a>,
    place: KvPlace,
    offset: usize,
    /// Slots left on the page at `offset`.
    left: u32,
}

impl<'a> KvWalk<'a> {
    /// A walk that starts at `place`.
    pub(crate) fn new(view: &'a KvView<'a>, row: &'a KvRow<'a>, place: KvPlace) -> Self {
        Self {
            view,
            row,
            place,
            offset: 0,
            left: 0,
        }
    }

    /// The offset at the current position; the next call is one position on.
    ///
    /// # Panics
    /// Past the end of the page table.
    #[inline(always)]
    pub(crate) fn step(&mut self) -> usize {
        if self.left == 0 {
            let page_tokens = self.view.layout.page_tokens();
            self.offset = self.view.offset(self.row, self.place);
            self.left = page_tokens - self.place.position % page_tokens;
        }
        let offset = self.offset;
        self.offset += self.view.layout.slot_stride();
        self.left -= 1;
        self.place.position += 1;
        offset
    }
}

/// Refuses head dimensions that no kernel computes.
pub(crate) fn check_head_dim(head_dim: u32) -> Result<(), KernelError> {
    let (multiple, max) = (HEAD_DIM_MULTIPLE as u32, HEAD_DIM_MAX as u32);
    if head_dim == 0 || !head_dim.is_multiple_of(multiple) || head_dim > max {
        return Err(KernelError::HeadDim {
            head_dim,
            multiple,
            max,
        });
    }
    Ok(())
}

/// Writes the K and V of a step's rows into their slots, rounded to the KV dtype.
///
/// # Shapes
/// `k`, `v`: `[tokens of all rows][kv_heads][head_dim]`, the rows one after another.
///
/// # Errors
/// Page tables that do not cover their rows, a layer outside the layout, lengths that differ.
pub fn store_kv(
    isa: Isa,
    view: &mut KvView<'_>,
    layer: u32,
    rows: &[KvRow<'_>],
    k: &[f32],
    v: &[f32],
) -> Result<(), KernelError> {
    let tokens = view.check(layer, rows)?;
    let layout = view.layout;
    let head_dim = layout.head_dim() as usize;
    let width = layout.kv_heads() as usize * head_dim;
    let wanted = checked_area("store_kv rows", tokens, width)?;
    check_len("store_kv keys", k.len(), wanted)?;
    check_len("store_kv values", v.len(), wanted)?;
    for (side, source) in [(KvSide::K, k), (KvSide::V, v)] {
        let mut tokens = source.chunks_exact(width);
        for row in rows {
            let positions = row.first_pos..row.first_pos + row.len;
            for (position, token) in positions.zip(&mut tokens) {
                for (head, values) in (0..).zip(token.chunks_exact(head_dim)) {
                    let at = view.offset(
                        row,
                        KvPlace {
                            position,
                            layer,
                            side,
                            head,
                        },
                    );
                    let dtype = layout.dtype();
                    let bytes_at = at * dtype.bytes() as usize;
                    let bytes = head_dim * dtype.bytes() as usize;
                    isa.run(Store {
                        bytes: &mut view.bytes[bytes_at..][..bytes],
                        dtype,
                        values,
                    });
                }
            }
        }
    }
    Ok(())
}

/// Writes one head vector in the KV dtype, rounded to nearest, ties to even.
pub(crate) struct Store<'a> {
    /// Where it belongs.
    pub(crate) bytes: &'a mut [u8],
    pub(crate) dtype: KvDtype,
    pub(crate) values: &'a [f32],
}

impl Store<'_> {
    /// The elements to write.
    #[inline(always)]
    fn out<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.bytes)
    }
}

impl Kernel for Store<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(mut self) {
        let values = self.values;
        match self.dtype {
            KvDtype::F32 => self.out().copy_from_slice(values),
            KvDtype::F16 => {
                let pairs = self.out::<f16>().iter_mut().zip(values);
                pairs.for_each(|(out, value)| *out = f16::from_f32(*value));
            }
            KvDtype::Bf16 => {
                let pairs = self.out::<bf16>().iter_mut().zip(values);
                pairs.for_each(|(out, value)| *out = bf16::from_f32(*value));
            }
        }
    }

    #[inline(always)]
    fn simd<L: Lanes>(mut self, l: L) {
        if self.dtype != KvDtype::F16 {
            return self.scalar();
        }
        let values = self.values.as_chunks().0;
        for (out, value) in self.out::<u16>().as_chunks_mut().0.iter_mut().zip(values) {
            l.store_f16(l.load(value), out);
        }
    }
}
