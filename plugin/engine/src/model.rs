//! A Llama-family model in memory: its sizes and its packed weights.
//!
//! One description covers llama (and mistral, which files call llama), qwen2 and qwen3: they
//! differ in biases, in norms of query and key heads, in the order of rotary pairs and in tied
//! embeddings, all of which the file tells. Whatever the file asks for beyond that is refused by
//! name, never approximated.
//!
//! Knows files and numbers; knows nothing of pages, steps or requests.

mod config;
mod load;
mod rope;

pub use config::{Architecture, ModelConfig};
#[cfg(feature = "cuda")]
pub(crate) use load::Source;
pub use rope::RopeTable;

use rootstock_kernels::{Isa, PackedMatrix};

/// The weights of one layer, as matrices `M` and vectors `V` of what computes: packed for a CPU,
/// or on a device.
#[derive(Debug)]
pub struct Layer<M = PackedMatrix, V = Vec<f32>> {
    /// Norm before attention, `[dim]`.
    pub attn_norm: V,
    /// Query projection, `[heads * head_dim][dim]`.
    pub q: Linear<M, V>,
    /// Key projection, `[kv_heads * head_dim][dim]`.
    pub k: Linear<M, V>,
    /// Value projection, `[kv_heads * head_dim][dim]`.
    pub v: Linear<M, V>,
    /// Norm of each query head, `[head_dim]`.
    pub q_norm: Option<V>,
    /// Norm of each key head, `[head_dim]`.
    pub k_norm: Option<V>,
    /// Output projection of attention, `[dim][heads * head_dim]`.
    pub attn_out: Linear<M, V>,
    /// Norm before the feed-forward part, `[dim]`.
    pub ffn_norm: V,
    /// Gate projection, `[ffn][dim]`.
    pub gate: Linear<M, V>,
    /// Up projection, `[ffn][dim]`.
    pub up: Linear<M, V>,
    /// Down projection, `[dim][ffn]`.
    pub down: Linear<M, V>,
}

/// A weight matrix with its optional bias.
#[derive(Debug)]
pub struct Linear<M = PackedMatrix, V = Vec<f32>> {
    /// `[out][in]`.
    pub weight: M,
    /// `[out]`.
    pub bias: Option<V>,
}

/// All weights of a file, wherever they were brought.
pub(crate) struct Weights<M, V> {
    pub(crate) embedding: M,
    /// None: tied to the embedding.
    pub(crate) output: Option<M>,
    pub(crate) layers: Vec<Layer<M, V>>,
    pub(crate) output_norm: V,
}

/// A loaded model.
#[derive(Debug)]
pub struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) rope: RopeTable,
    pub(crate) embedding: PackedMatrix,
    pub(crate) layers: Vec<Layer>,
    pub(crate) output_norm: Vec<f32>,
    /// None: tied to the embedding.
    pub(crate) output: Option<PackedMatrix>,
    pub(crate) isa: Isa,
}

impl Model {
    /// Sizes and constants.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The instruction set the weights are packed for.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Bytes of all weights in memory.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        let layers = self.layers.iter().flat_map(Layer::matrices);
        let ends = std::iter::once(&self.embedding).chain(&self.output);
        layers.chain(ends).map(PackedMatrix::bytes).sum::<usize>() as u64
    }

    /// The matrix that turns the last hidden state into logits.
    pub(crate) fn head(&self) -> &PackedMatrix {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}

impl<M, V> Layer<M, V> {
    /// Its matrices, in the order they are used.
    pub(crate) fn matrices(&self) -> [&M; 7] {
        [
            &self.q,
            &self.k,
            &self.v,
            &self.attn_out,
            &self.gate,
            &self.up,
            &self.down,
        ]
        .map(|linear| &linear.weight)
    }
}
