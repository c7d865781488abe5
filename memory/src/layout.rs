//! Where the bytes of one token slot lie. Page-first is ours; layer-first describes what host
//! engines use. All offsets are 64-bit, so that large pools do not wrap.
//!
//! ```text
//! page-first:            [page][layer][k|v][kv_head][slot][head_dim]      one buffer
//! layer-first, a layer:         [page][k|v][kv_head][slot][head_dim]      one buffer a layer
//! ```

use crate::PageId;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Element type of stored keys and values.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum KvDtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl KvDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Which dimension is outermost.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum LayoutOrder {
    /// All layers of a page lie together: moving a page is one contiguous copy.
    PageFirst,
    /// One buffer a layer, as most host engines have it.
    LayerFirst,
}

/// Keys or values.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum KvSide {
    /// Keys.
    K,
    /// Values.
    V,
}

/// The numbers a layout is made of, before they are checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LayoutSpec {
    /// Which dimension is outermost.
    pub order: LayoutOrder,
    /// Token slots a page.
    pub page_tokens: u32,
    /// Layers of the model.
    pub layers: u32,
    /// Key/value heads a layer.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Element type.
    pub dtype: KvDtype,
}

/// A place in the pool: one head vector of one token slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvSlot {
    /// Page.
    pub page: PageId,
    /// Layer, from 0.
    pub layer: u32,
    /// Keys or values.
    pub side: KvSide,
    /// Key/value head, from 0.
    pub head: u32,
    /// Token slot inside the page, from 0.
    pub slot: u32,
}

/// A layout that cannot be.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A dimension is zero.
    #[error("{dimension} is 0, expected at least 1")]
    Zero {
        /// Name of the dimension.
        dimension: &'static str,
    },
    /// A dimension is larger than any model has.
    #[error("{dimension} is {value}, expected at most {limit}")]
    TooLarge {
        /// Name of the dimension.
        dimension: &'static str,
        /// What was given.
        value: u32,
        /// The most that is accepted.
        limit: u32,
    },
    /// One page would be larger than `limit_bytes`.
    #[error("one page would take {page_bytes} bytes, expected at most {limit_bytes}")]
    PageTooLarge {
        /// Bytes of one page.
        page_bytes: u128,
        /// The most that is accepted.
        limit_bytes: u64,
    },
}

/// The checked shape of the KV pool. Sizes fit `u64` and `usize` by construction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "LayoutSpec", into = "LayoutSpec")]
pub struct KvLayout {
    spec: LayoutSpec,
}

impl KvLayout {
    /// Largest page accepted: 1 GiB.
    pub const PAGE_BYTES_MAX: u64 = 1 << 30;

    /// Checks the numbers.
    ///
    /// # Errors
    /// A dimension of 0, a dimension above 2^20, or a page above [`Self::PAGE_BYTES_MAX`].
    pub fn new(spec: LayoutSpec) -> Result<Self, LayoutError> {
        const LIMIT: u32 = 1 << 20;
        let dimensions = [
            ("page_tokens", spec.page_tokens),
            ("layers", spec.layers),
            ("kv_heads", spec.kv_heads),
            ("head_dim", spec.head_dim),
        ];
        let mut page_bytes = 2 * u128::from(spec.dtype.bytes());
        for (dimension, value) in dimensions {
            if value == 0 {
                return Err(LayoutError::Zero { dimension });
            }
            if value > LIMIT {
                return Err(LayoutError::TooLarge {
                    dimension,
                    value,
                    limit: LIMIT,
                });
            }
            page_bytes *= u128::from(value);
        }
        let limit_bytes = Self::PAGE_BYTES_MAX;
        if page_bytes > u128::from(limit_bytes) {
            return Err(LayoutError::PageTooLarge {
                page_bytes,
                limit_bytes,
            });
        }
        Ok(Self { spec })
    }

    /// The numbers.
    pub const fn spec(&self) -> LayoutSpec {
        self.spec
    }

    /// Which dimension is outermost.
    pub const fn order(&self) -> LayoutOrder {
        self.spec.order
    }

    /// Token slots a page.
    pub const fn page_tokens(&self) -> u32 {
        self.spec.page_tokens
    }

    /// Layers.
    pub const fn layers(&self) -> u32 {
        self.spec.layers
    }

    /// Key/value heads a layer.
    pub const fn kv_heads(&self) -> u32 {
        self.spec.kv_heads
    }

    /// Elements of one head.
    pub const fn head_dim(&self) -> u32 {
        self.spec.head_dim
    }

    /// Element type.
    pub const fn dtype(&self) -> KvDtype {
        self.spec.dtype
    }

    /// Elements between two slots of one head.
    pub const fn slot_stride(&self) -> usize {
        self.spec.head_dim as usize
    }

    /// Elements between two heads.
    pub const fn head_stride(&self) -> usize {
        self.slot_stride() * self.spec.page_tokens as usize
    }

    /// Elements between the keys and the values of one page and layer.
    pub const fn side_stride(&self) -> usize {
        self.head_stride() * self.spec.kv_heads as usize
    }

    /// Elements of one page in one layer, keys and values.
    pub const fn layer_elements(&self) -> usize {
        self.side_stride() * 2
    }

    /// Elements of one page over all layers.
    pub const fn page_elements(&self) -> usize {
        self.layer_elements() * self.spec.layers as usize
    }

    /// Bytes of one page in one layer, keys and values.
    pub const fn layer_bytes(&self) -> usize {
        self.layer_elements() * self.spec.dtype.bytes() as usize
    }

    /// Bytes of one page over all layers.
    pub const fn page_bytes(&self) -> usize {
        self.page_elements() * self.spec.dtype.bytes() as usize
    }

    /// Bytes that one token takes over all layers.
    pub const fn token_bytes(&self) -> usize {
        self.page_bytes() / self.spec.page_tokens as usize
    }

    /// Element offset of the head vector at `at`: in the whole buffer when page-first, in the
    /// buffer of that layer when layer-first.
    ///
    /// # Panics
    /// In debug builds, when a coordinate is outside of the layout.
    pub fn element_offset(&self, at: KvSlot) -> u64 {
        debug_assert!(at.layer < self.spec.layers && at.head < self.spec.kv_heads);
        debug_assert!(at.slot < self.spec.page_tokens);
        let page = u64::from(at.page.get());
        let before = match self.spec.order {
            LayoutOrder::PageFirst => {
                page * self.page_elements() as u64
                    + u64::from(at.layer) * self.layer_elements() as u64
            }
            LayoutOrder::LayerFirst => page * self.layer_elements() as u64,
        };
        let side = match at.side {
            KvSide::K => 0,
            KvSide::V => self.side_stride() as u64,
        };
        before
            + side
            + u64::from(at.head) * self.head_stride() as u64
            + u64::from(at.slot) * self.slot_stride() as u64
    }
}

impl TryFrom<LayoutSpec> for KvLayout {
    type Error = LayoutError;

    fn try_from(spec: LayoutSpec) -> Result<Self, LayoutError> {
        Self::new(spec)
    }
}

impl From<KvLayout> for LayoutSpec {
    fn from(layout: KvLayout) -> Self {
        layout.spec
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> LayoutSpec {
        LayoutSpec {
            order: LayoutOrder::PageFirst,
            page_tokens: 16,
            layers: 30,
            kv_heads: 3,
            head_dim: 64,
            dtype: KvDtype::F16,
        }
    }

    #[test]
    fn sizes_follow_from_the_dimensions() {
        let layout = KvLayout::new(spec()).unwrap();
        assert_eq!(layout.page_bytes(), 16 * 30 * 3 * 64 * 2 * 2);
        assert_eq!(layout.layer_bytes() * 30, layout.page_bytes());
        assert_eq!(layout.token_bytes() * 16, layout.page_bytes());
    }

    #[test]
    fn page_first_offsets_enumerate_the_buffer_without_gap_or_overlap() {
        let small = LayoutSpec {
            page_tokens: 2,
            layers: 2,
            kv_heads: 3,
            head_dim: 4,
            ..spec()
        };
        let layout = KvLayout::new(small).unwrap();
        let mut expected = 0;
        for page in 0..3 {
            for layer in 0..2 {
                for side in [KvSide::K, KvSide::V] {
                    for head in 0..3 {
                        for slot in 0..2 {
                            let page = PageId::new(page);
                            let at = KvSlot {
                                page,
                                layer,
                                side,
                                head,
                                slot,
                            };
                            assert_eq!(layout.element_offset(at), expected);
                            expected += 4;
                        }
                    }
                }
            }
        }
        assert_eq!(expected, 3 * layout.page_elements() as u64);
    }

    #[test]
    fn offsets_do_not_wrap_at_32_bits() {
        let layout = KvLayout::new(spec()).unwrap();
        let at = |page| KvSlot {
            page,
            layer: 0,
            side: KvSide::K,
            head: 0,
            slot: 0,
        };
        let far = layout.element_offset(at(PageId::new(u32::MAX)));
        assert_eq!(far, u64::from(u32::MAX) * layout.page_elements() as u64);
    }

    #[test]
    fn layer_first_offsets_are_relative_to_the_layer() {
        let layout = KvLayout::new(LayoutSpec {
            order: LayoutOrder::LayerFirst,
            ..spec()
        })
        .unwrap();
        let at = |layer| KvSlot {
            page: PageId::new(2),
            layer,
            side: KvSide::V,
            head: 1,
            slot: 3,
        };
        assert_eq!(layout.element_offset(at(0)), layout.element_offset(at(29)));
    }

    #[test]
    fn a_zero_dimension_or_a_giant_page_is_refused_with_its_number() {
        let zero = KvLayout::new(LayoutSpec {
            page_tokens: 0,
            ..spec()
        })
        .unwrap_err();
        assert_eq!(zero.to_string(), "page_tokens is 0, expected at least 1");
        let wide = KvLayout::new(LayoutSpec {
            head_dim: 1 << 21,
            ..spec()
        })
        .unwrap_err();
        assert!(matches!(wide, LayoutError::TooLarge { value, .. } if value == 1 << 21));
        let giant = LayoutSpec {
            head_dim: 1 << 20,
            layers: 1 << 20,
            ..spec()
        };
        assert!(matches!(
            KvLayout::new(giant),
            Err(LayoutError::PageTooLarge { .. })
        ));
    }
}
