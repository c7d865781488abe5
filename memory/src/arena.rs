//! Bytes of a tier that lives in this process: the device tier of the CPU backend, or the host
//! tier. Zero-initialised (so untouched pages cost no memory), 64-byte aligned, page-first.

use crate::{KvDtype, KvLayout, LayoutOrder, PageId};
use thiserror::Error;

/// Bytes of a cache line: the alignment of page 0.
const LINE: usize = 64;

/// An arena that cannot be made.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// Only page-first arenas exist: in another order a page is not contiguous.
    #[error("an arena needs the page-first layout, found {order:?}")]
    NotPageFirst {
        /// What was given.
        order: LayoutOrder,
    },
    /// The system has no room for it.
    #[error("no memory for {pages} pages of {page_bytes} bytes; ask for fewer pages")]
    NoMemory {
        /// Pages asked for, scratch page included.
        pages: u64,
        /// Bytes of one page.
        page_bytes: u64,
    },
}

/// `total + 1` pages of bytes: the scratch page 0 and the usable pages `1..=total`.
pub struct KvArena {
    layout: KvLayout,
    total: u32,
    /// Of a type that the system allocator zeroes lazily; one aligned to a whole line it would
    /// write through at once.
    words: Box<[u128]>,
    /// Bytes before the first line boundary.
    skip: usize,
}

impl std::fmt::Debug for KvArena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("KvArena");
        out.field("layout", &self.layout)
            .field("total", &self.total)
            .finish_non_exhaustive()
    }
}

impl KvArena {
    /// An arena of `total` usable pages, all zero.
    ///
    /// # Errors
    /// The layout is not page-first, or there is no memory.
    /// # Cost
    /// Address space now; memory when a page is first written.
    pub fn new(layout: KvLayout, total: u32) -> Result<Self, ArenaError> {
        if layout.order() != LayoutOrder::PageFirst {
            return Err(ArenaError::NotPageFirst {
                order: layout.order(),
            });
        }
        let pages = u64::from(total) + 1;
        let page_bytes = layout.page_bytes() as u64;
        let no_memory = ArenaError::NoMemory { pages, page_bytes };
        let bytes = pages
            .checked_mul(page_bytes)
            .and_then(|n| usize::try_from(n).ok());
        let Some(bytes) = bytes.filter(|&n| isize::try_from(n).is_ok_and(|n| n < isize::MAX - 64))
        else {
            return Err(no_memory);
        };
        let words = (bytes + LINE).div_ceil(size_of::<u128>());
        let Ok(words) = bytemuck::allocation::try_zeroed_slice_box::<u128>(words) else {
            return Err(no_memory);
        };
        let skip = bytemuck::cast_slice::<u128, u8>(&words)
            .as_ptr()
            .align_offset(LINE);
        Ok(Self {
            layout,
            total,
            words,
            skip,
        })
    }

    /// The layout.
    pub const fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Usable pages.
    pub const fn total(&self) -> u32 {
        self.total
    }

    /// All bytes, scratch page first.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.skip..self.skip + self.len()]
    }

    /// All bytes, scratch page first.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let end = self.skip + self.len();
        &mut bytemuck::cast_slice_mut(&mut self.words)[self.skip..end]
    }

    /// All elements of an F32 arena; `None` when its element type is another.
    pub fn as_f32(&self) -> Option<&[f32]> {
        (self.layout.dtype() == KvDtype::F32).then(|| bytemuck::cast_slice(self.bytes()))
    }

    /// All elements of an F32 arena; `None` when its element type is another.
    pub fn as_f32_mut(&mut self) -> Option<&mut [f32]> {
        let same = self.layout.dtype() == KvDtype::F32;
        same.then(|| bytemuck::cast_slice_mut(self.bytes_mut()))
    }

    /// Bit patterns of all elements of an F16 or BF16 arena; `None` for F32.
    pub fn as_u16(&self) -> Option<&[u16]> {
        (self.layout.dtype() != KvDtype::F32).then(|| bytemuck::cast_slice(self.bytes()))
    }

    /// Bit patterns of all elements of an F16 or BF16 arena; `None` for F32.
    pub fn as_u16_mut(&mut self) -> Option<&mut [u16]> {
        let same = self.layout.dtype() != KvDtype::F32;
        same.then(|| bytemuck::cast_slice_mut(self.bytes_mut()))
    }

    /// Elements of an F16 arena; `None` when its element type is another.
    pub fn as_f16(&self) -> Option<&[half::f16]> {
        (self.layout.dtype() == KvDtype::F16).then(|| bytemuck::cast_slice(self.bytes()))
    }

    /// Elements of a BF16 arena; `None` when its element type is another.
    pub fn as_bf16(&self) -> Option<&[half::bf16]> {
        (self.layout.dtype() == KvDtype::Bf16).then(|| bytemuck::cast_slice(self.bytes()))
    }

    /// The bytes of one page.
    ///
    /// # Panics
    /// When the arena has no such page.
    pub fn page(&self, page: PageId) -> &[u8] {
        let range = self.range(page);
        &self.bytes()[range]
    }

    /// The bytes of one page.
    ///
    /// # Panics
    /// When the arena has no such page.
    pub fn page_mut(&mut self, page: PageId) -> &mut [u8] {
        let range = self.range(page);
        &mut self.bytes_mut()[range]
    }

    /// Copies page `from` over page `to` of the same arena.
    ///
    /// # Panics
    /// When the arena has no such page.
    pub fn copy_page(&mut self, from: PageId, to: PageId) {
        let (from, to) = (self.range(from), self.range(to));
        self.bytes_mut().copy_within(from, to.start);
    }

    /// Copies page `from` of `source` over page `to`, whole layers `layers` only.
    ///
    /// # Panics
    /// When the layouts differ, or there is no such page or layer.
    pub fn copy_from(
        &mut self,
        to: PageId,
        source: &Self,
        from: PageId,
        layers: std::ops::Range<u16>,
    ) {
        assert_eq!(self.layout, source.layout, "arenas of two layouts");
        let layer = self.layout.layer_bytes();
        let part = usize::from(layers.start) * layer..usize::from(layers.end) * layer;
        self.page_mut(to)[part.clone()].copy_from_slice(&source.page(from)[part]);
    }

    fn len(&self) -> usize {
        (self.total as usize + 1) * self.layout.page_bytes()
    }

    fn range(&self, page: PageId) -> std::ops::Range<usize> {
        assert!(
            page.get() <= self.total,
            "page {} of {}",
            page.get(),
            self.total
        );
        let bytes = self.layout.page_bytes();
        page.index() * bytes..(page.index() + 1) * bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LayoutSpec;

    fn arena(dtype: KvDtype) -> KvArena {
        let order = LayoutOrder::PageFirst;
        let spec = LayoutSpec {
            order,
            page_tokens: 3,
            layers: 2,
            kv_heads: 1,
            head_dim: 5,
            dtype,
        };
        KvArena::new(KvLayout::new(spec).unwrap(), 4).unwrap()
    }

    #[test]
    fn an_arena_is_zero_aligned_and_has_a_scratch_page() {
        let arena = arena(KvDtype::F16);
        assert!(arena.bytes().iter().all(|&byte| byte == 0));
        assert_eq!(arena.bytes().as_ptr().align_offset(64), 0);
        assert_eq!(arena.bytes().len(), 5 * arena.layout().page_bytes());
        assert_eq!(
            arena.page(PageId::new(4)).len(),
            arena.layout().page_bytes()
        );
    }

    #[test]
    fn a_page_copy_touches_no_other_page() {
        let mut arena = arena(KvDtype::F32);
        for page in 0..5_u8 {
            arena.page_mut(PageId::new(page.into())).fill(page);
        }
        arena.copy_page(PageId::new(3), PageId::new(1));
        for (page, value) in [(0, 0), (1, 3), (2, 2), (3, 3), (4, 4)] {
            assert!(
                arena
                    .page(PageId::new(page))
                    .iter()
                    .all(|&byte| byte == value)
            );
        }
    }

    #[test]
    fn a_copy_between_arenas_moves_the_named_layers_only() {
        let (mut to, mut from) = (arena(KvDtype::Bf16), arena(KvDtype::Bf16));
        from.page_mut(PageId::new(2)).fill(7);
        to.copy_from(PageId::new(1), &from, PageId::new(2), 1..2);
        let layer = to.layout().layer_bytes();
        assert!(
            to.page(PageId::new(1))[..layer]
                .iter()
                .all(|&byte| byte == 0)
        );
        assert!(
            to.page(PageId::new(1))[layer..]
                .iter()
                .all(|&byte| byte == 7)
        );
    }

    #[test]
    fn typed_views_exist_for_their_own_type_only() {
        let (mut wide, mut narrow) = (arena(KvDtype::F32), arena(KvDtype::F16));
        assert!(wide.as_f32_mut().is_some() && wide.as_u16_mut().is_none());
        assert!(narrow.as_u16_mut().is_some() && narrow.as_f32_mut().is_none());
        assert!(narrow.as_f16().is_some() && narrow.as_bf16().is_none());
    }

    #[test]
    fn an_arena_beyond_memory_is_an_error_that_names_its_size() {
        let layout = *arena(KvDtype::F32).layout();
        let big = LayoutSpec {
            page_tokens: 1 << 10,
            head_dim: 1 << 16,
            ..layout.spec()
        };
        let error = KvArena::new(KvLayout::new(big).unwrap(), u32::MAX).unwrap_err();
        assert!(matches!(error, ArenaError::NoMemory { .. }), "{error}");
    }
}
