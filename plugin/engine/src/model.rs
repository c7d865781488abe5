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
pub(crate) use load::{Job, Source};
pub use rope::RopeTable;

use rootstock_kernels::{Isa, PackedMatrix};

/// The weights of one layer.
#[derive(Debug)]
pub struct Layer {
    /// Norm before attention, `[dim]`.
    pub attn_norm: Vec<f32>,
    /// Query projection, `[heads * head_dim][dim]`.
    pub q: Linear,
    /// Key projection, `[kv_heads * head_dim][dim]`.
    pub k: Linear,
    /// Value projection, `[kv_heads * head_dim][dim]`.
    pub v: Linear,
    /// Norm of each query head, `[head_dim]`.
    pub q_norm: Option<Vec<f32>>,
    /// Norm of each key head, `[head_dim]`.
    pub k_norm: Option<Vec<f32>>,
    /// Output projection of attention, `[dim][heads * head_dim]`.
    pub attn_out: Linear,
    /// Norm before the feed-forward part, `[dim]`.
    pub ffn_norm: Vec<f32>,
    /// Gate projection, `[ffn][dim]`.
    pub gate: Linear,
    /// Up projection, `[ffn][dim]`.
    pub up: Linear,
    /// Down projection, `[dim][ffn]`.
    pub down: Linear,
}

/// A weight matrix with its optional bias.
#[derive(Debug)]
pub struct Linear {
    /// `[out][in]`.
    pub weight: PackedMatrix,
    /// `[out]`.
    pub bias: Option<Vec<f32>>,
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
        let matrices: usize = self.layers.iter().map(Layer::bytes).sum();
        let ends = self.embedding.bytes() + self.output.as_ref().map_or(0, PackedMatrix::bytes);
        (matrices + ends) as u64
    }

    /// The matrix that turns the last hidden state into logits.
    pub(crate) fn head(&self) -> &PackedMatrix {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}

impl Layer {
    fn bytes(&self) -> usize {
        [
            &self.q,
            &self.k,
            &self.v,
            &self.attn_out,
            &self.gate,
            &self.up,
            &self.down,
        ]
        .iter()
        .map(|linear| linear.weight.bytes())
        .sum()
    }
}
