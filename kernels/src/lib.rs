//! Arithmetic over KV arenas: SIMD with run-time dispatch beside a scalar reference.
//!
//! [`cpu`] is the CPU backend: weight matrices repacked at load, matrix products over all rows
//! of a step, paged attention that reads K and V back from the arena, norms, rope and sampling.
//! `cuda` (feature `cuda`) is the same for NVIDIA devices, found at run time.
//!
//! Batch invariance holds for every function of [`cpu`], and on request for those of `cuda`: an
//! output element has one accumulation order, whatever the number of rows in the step, the
//! chunking of a prompt, the page table or the number of threads. So a token is the same bit for
//! bit, warm or cold, alone or in a batch.
//!
//! The crate knows pages and layouts of `rootstock-memory`; it knows no models, no requests and
//! no files.
#![expect(
    clippy::cast_possible_truncation,
    reason = "kernels convert between element widths everywhere; sizes are checked on entry"
)]

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

pub use cpu::{
    AttentionArgs, GgmlType, HeadArgs, Heads, Input, Isa, KernelError, KvRow, KvView, PackedMatrix,
    Product, RopeAngles, RopeStyle, SampleArgs, SampleScratch, Sampled, Scratch, ThreadPool,
    WeightRoom, add, advise_huge, argmax, attention, dequantize, matmul, numerics_id, place_heads,
    products, qk_norm, rms_norm, rope, sample, silu_mul, softmax, store_kv,
};
