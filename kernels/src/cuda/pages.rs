//! The pool of pages on a device: the page-first layout, 8-bit element types included.
//!
//! 8-bit pages keep a scale a slot behind the slots of each head, `[slot][head_dim] u8` then
//! `[slot] f32`, so a page stays one contiguous piece of memory whatever its type.

use rootstock_memory::{KvDtype, KvLayout, LayoutError, LayoutOrder, LayoutSpec};

use super::args;
use super::buffer::DeviceBuffer;
use super::device::Device;
use super::error::CudaError;
use crate::cpu::KernelError;

/// Element type of keys and values on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFormat {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE floats.
    F16,
    /// 16-bit brain floats.
    Bf16,
    /// 8-bit floats with 4 bits of exponent, and a scale a slot.
    E4m3,
    /// 8-bit integers, and a scale a slot.
    Int8,
}

impl KvFormat {
    /// Every type.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::E4m3, Self::Int8];

    /// A short name, part of what identifies KV.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::E4m3 => "e4m3",
            Self::Int8 => "int8",
        }
    }

    /// The number the kernels know it by.
    pub(super) fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Bf16 => 2,
            Self::E4m3 => 3,
            Self::Int8 => 4,
        }
    }

    /// Bytes of one element.
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 | Self::Int8 => 1,
        }
    }

    /// Bytes of a slot of one head, its scale included.
    const fn slot_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => self.element_bytes() * head_dim,
            Self::E4m3 | Self::Int8 => head_dim + size_of::<f32>(),
        }
    }

    /// The type whose elements these are, where pages of the host have it too.
    pub const fn of(dtype: KvDtype) -> Self {
        match dtype {
            KvDtype::F32 => Self::F32,
            KvDtype::F16 => Self::F16,
            KvDtype::Bf16 => Self::Bf16,
        }
    }
}

/// Sizes of the pages: the dimensions of a layout, in a format of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShape {
    layout: KvLayout,
    format: KvFormat,
}

impl PageShape {
    /// Checks that the kernels compute this shape; of the layout the dimensions count.
    ///
    /// # Errors
    /// A layer-first layout, a page size that is no power of two (at least 4 for 8-bit types), a
    /// head width that is no multiple of 16 or above 256.
    pub fn new(layout: KvLayout, format: KvFormat) -> Result<Self, KernelError> {
        if layout.order() != LayoutOrder::PageFirst {
            return Err(KernelError::LayoutOrder);
        }
        crate::cpu::check_head_dim(layout.head_dim())?;
        let page_tokens = layout.page_tokens();
        // The scales of a head must end where 16 bytes do.
        let least = if format.element_bytes() == 1 { 4 } else { 1 };
        if !page_tokens.is_power_of_two() || page_tokens < least {
            return Err(KernelError::PageTokens { page_tokens, least });
        }
        Ok(Self { layout, format })
    }

    /// The layout by which other tiers keep these pages: the sizes are right, and what the bytes
    /// mean is known here only. Slots of 8 bits and their scale are as long as those of half
    /// precision and another width.
    ///
    /// # Errors
    /// The pages are larger than a layout can be.
    pub fn host_layout(&self) -> Result<KvLayout, LayoutError> {
        let spec = self.layout.spec();
        let (dtype, head_dim) = match self.format {
            KvFormat::F32 => (KvDtype::F32, spec.head_dim),
            KvFormat::F16 => (KvDtype::F16, spec.head_dim),
            KvFormat::Bf16 => (KvDtype::Bf16, spec.head_dim),
            KvFormat::E4m3 | KvFormat::Int8 => {
                let bytes = self.format.slot_bytes(spec.head_dim as usize);
                (KvDtype::F16, (bytes / size_of::<half::f16>()) as u32)
            }
        };
        KvLayout::new(LayoutSpec {
            dtype,
            head_dim,
            ..spec
        })
    }

    /// The layout of the dimensions; its sizes are those of the pages unless they have 8 bits.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Element type.
    pub fn format(&self) -> KvFormat {
        self.format
    }

    pub(super) fn head_bytes(&self) -> usize {
        let slot = self.format.slot_bytes(self.layout.head_dim() as usize);
        slot * self.layout.page_tokens() as usize
    }

    fn side_bytes(&self) -> usize {
        self.head_bytes() * self.layout.kv_heads() as usize
    }

    /// Bytes of one layer of a page.
    pub fn layer_bytes(&self) -> usize {
        2 * self.side_bytes()
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.layer_bytes() * self.layout.layers() as usize
    }
}

/// `total + 1` pages on a device: the scratch page 0 and the usable pages `1..=total`.
#[derive(Debug)]
pub struct DevicePages {
    pub(super) bytes: DeviceBuffer<u8>,
    shape: PageShape,
    total: u32,
}

impl DevicePages {
    /// Takes the memory.
    ///
    /// # Errors
    /// The device has too little.
    pub fn new(device: &Device, shape: PageShape, total: u32) -> Result<Self, CudaError> {
        let bytes = (total as usize + 1).saturating_mul(shape.page_bytes());
        Ok(Self {
            bytes: DeviceBuffer::new(device, bytes, "key-value pages")?,
            shape,
            total,
        })
    }

    /// Sizes of the pages.
    pub fn shape(&self) -> &PageShape {
        &self.shape
    }

    /// Usable pages.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// All bytes, scratch page first.
    pub fn bytes(&self) -> &DeviceBuffer<u8> {
        &self.bytes
    }

    /// All bytes, scratch page first.
    pub fn bytes_mut(&mut self) -> &mut DeviceBuffer<u8> {
        &mut self.bytes
    }

    /// The pages as the kernels of one layer see them.
    pub(super) fn layer(&self, layer: u32) -> Result<args::KvPages, KernelError> {
        let layers = self.shape.layout.layers();
        if layer >= layers {
            return Err(KernelError::LayerOutOfRange { layer, layers });
        }
        Ok(args::KvPages {
            base: self
                .bytes
                .address_at(layer as usize * self.shape.layer_bytes()),
            page_bytes: self.shape.page_bytes() as i64,
            side_bytes: self.shape.side_bytes() as i64,
            head_bytes: self.shape.head_bytes() as i64,
            page_shift: self.shape.layout.page_tokens().trailing_zeros(),
            pages: self.total + 1,
        })
    }
}
