//! The CPU backend: one scalar reference and SIMD paths chosen at run time.
//!
//! | file | what |
//! |---|---|
//! | `isa` | instruction sets, as proofs that this CPU has them |
//! | `lanes` | vectors of 16 floats: one kernel source for all instruction sets |
//! | `pool` | threads of a step |
//! | `ggml`, `forms`, `matrix`, `prepare`, `matmul` | weight formats, repacking, products |
//! | `heads`, `kv`, `attention` | K and V in the arena, paged attention |
//! | `norm`, `rope`, `sample` | the rest of a step |
//! | `huge` | where weights and KV lie: on huge pages |

mod act;
mod attention;
mod error;
mod forms;
mod ggml;
mod heads;
mod huge;
mod isa;
mod kv;
mod lanes;
mod matmul;
mod matrix;
mod norm;
mod pool;
mod prepare;
mod rope;
mod sample;
mod scratch;
mod shared;
mod tile_product;
mod tiles;

pub use attention::{AttentionArgs, attention};
pub use error::KernelError;
#[cfg(feature = "cuda")]
pub(crate) use error::{check_len, checked_area};
pub use ggml::{GgmlType, dequantize};
pub use heads::{HeadArgs, Heads, place_heads};
pub use huge::{WeightRoom, advise_huge};
pub use isa::{Isa, numerics_id};
pub use kv::{KvRow, KvView, store_kv};
#[cfg(feature = "cuda")]
pub(crate) use kv::{check_head_dim, check_tables};
pub use matmul::{Product, matmul, products};
pub use matrix::PackedMatrix;
pub use norm::{add, argmax, qk_norm, rms_norm, silu_mul, softmax};
pub use pool::ThreadPool;
pub use prepare::Input;
pub use rope::{RopeAngles, RopeStyle, rope};
pub use sample::{SampleArgs, SampleScratch, Sampled, sample};
pub use scratch::Scratch;
