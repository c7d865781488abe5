//! The arguments of the kernels: each structure has the fields of its twin in `kernels/cuda`.
//! Addresses are device addresses as numbers.

/// `KvPages`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct KvPages {
    pub(super) base: u64,
    pub(super) page_bytes: i64,
    pub(super) side_bytes: i64,
    pub(super) head_bytes: i64,
    pub(super) page_shift: u32,
    pub(super) pages: u32,
}

/// `StoreArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Store {
    pub(super) kv: KvPages,
    pub(super) q: u64,
    pub(super) k: u64,
    pub(super) v: u64,
    pub(super) q_norm: u64,
    pub(super) k_norm: u64,
    pub(super) cos: u64,
    pub(super) sin: u64,
    pub(super) positions: u64,
    pub(super) tables: u64,
    pub(super) pages: u64,
    pub(super) n: u32,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) halves: u32,
    pub(super) eps: f32,
}

/// `DecodeArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Decode {
    pub(super) kv: KvPages,
    pub(super) q: u64,
    pub(super) out: u64,
    pub(super) partial: u64,
    pub(super) chosen: u64,
    pub(super) positions: u64,
    pub(super) tables: u64,
    pub(super) pages: u64,
    pub(super) n: u32,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) splits: u32,
    pub(super) split_tokens: u32,
    pub(super) scale: f32,
}

/// `PrefillArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Prefill {
    pub(super) kv: KvPages,
    pub(super) q: u64,
    pub(super) out: u64,
    pub(super) positions: u64,
    pub(super) tables: u64,
    pub(super) pages: u64,
    pub(super) tiles: u64,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) scale: f32,
}

/// `NormArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Norm {
    pub(super) x: u64,
    pub(super) weight: u64,
    pub(super) out: u64,
    pub(super) rows: u64,
    pub(super) n: u32,
    pub(super) width: u32,
    pub(super) eps: f32,
}

/// `SiluArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Silu {
    pub(super) gate: u64,
    pub(super) up: u64,
    pub(super) count: u64,
}

/// `EmbedArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Embed {
    pub(super) table: u64,
    pub(super) tokens: u64,
    pub(super) out: u64,
    pub(super) width: u32,
    pub(super) weight_type: u32,
    pub(super) vocab: u32,
}

/// `ProductArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Product {
    pub(super) weights: u64,
    pub(super) x: u64,
    pub(super) out: u64,
    pub(super) bias: u64,
    pub(super) n: u32,
    pub(super) rows: u32,
    pub(super) cols: u32,
    pub(super) add: u32,
}

/// `NarrowArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Narrow {
    pub(super) x: u64,
    pub(super) out: u64,
    pub(super) count: u64,
    pub(super) weight_type: u32,
}

/// `ApartArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Apart {
    pub(super) blocks: u64,
    pub(super) bodies: u64,
    pub(super) heads: u64,
    pub(super) count: u64,
    pub(super) block: u32,
    pub(super) body: u32,
    pub(super) head_first: u32,
}

/// `PagesArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Pages {
    pub(super) arena: u64,
    pub(super) packed: u64,
    pub(super) pages: u64,
    pub(super) page_bytes: i64,
    pub(super) offset: i64,
    pub(super) bytes: i64,
    pub(super) count: u32,
}

/// `FeedArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Feed {
    pub(super) tokens: u64,
    pub(super) drawn: u64,
    pub(super) pairs: u64,
    pub(super) count: u32,
}

/// `SampleArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Sample {
    pub(super) logits: u64,
    pub(super) rows: u64,
    pub(super) tokens: u64,
    pub(super) vocab: u32,
}

/// Marks the structures that a kernel takes: plain numbers, laid out as in C.
pub(super) trait Args: Copy {}

impl Args for Store {}
impl Args for Decode {}
impl Args for Prefill {}
impl Args for Norm {}
impl Args for Silu {}
impl Args for Embed {}
impl Args for Product {}
impl Args for Narrow {}
impl Args for Apart {}
impl Args for Pages {}
impl Args for Feed {}
impl Args for Sample {}
