//! Sizes and constants of a model, read from metadata and checked once.
//!
//! The arithmetic after this file trusts these numbers: heads divide evenly, widths fit the
//! kernels, products fit 32 bits.

use crate::error::EngineError;
use crate::gguf::Gguf;

const SUPPORTED: &str = "llama (mistral files say llama), qwen2, qwen3";
/// No size of a real model comes near; it keeps every product below 2^63.
const SIZE_MAX: u32 = 1 << 24;

/// The families this engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama and Mistral: rotary pairs are neighbors.
    Llama,
    /// Qwen2: rotary pairs are half a head apart; biases on q, k and v.
    Qwen2,
    /// Qwen3: as Qwen2 with a norm on each query and key head instead of biases.
    Qwen3,
}

impl Architecture {
    /// The name files use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    fn parse(found: &str) -> Result<Self, EngineError> {
        match found {
            "llama" => Ok(Self::Llama),
            "qwen2" => Ok(Self::Qwen2),
            "qwen3" => Ok(Self::Qwen3),
            _ => Err(EngineError::Architecture {
                found: found.to_owned(),
                supported: SUPPORTED,
            }),
        }
    }
}

/// Sizes and constants of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// `general.name`, or the family's name.
    pub name: String,
    /// Layers.
    pub layers: u32,
    /// Width of the hidden state.
    pub dim: u32,
    /// Width of the feed-forward part.
    pub ffn: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Width of a head; a multiple of 16, at most 256.
    pub head_dim: u32,
    /// Number of token ids.
    pub vocab: u32,
    /// Positions the model was made for, in tokens; sliding windows count as its end.
    pub context: u32,
    /// Epsilon of the norms.
    pub eps: f32,
}

impl ModelConfig {
    /// Reads the sizes of a file.
    ///
    /// # Errors
    /// The first key that is missing or asks for what this engine does not compute.
    pub fn read(file: &Gguf) -> Result<Self, EngineError> {
        let architecture = Architecture::parse(file.text("general.architecture")?)?;
        let keys = Keys {
            file,
            prefix: architecture.name(),
        };
        keys.refuse_extensions()?;
        let heads = keys.size("attention.head_count")?;
        let dim = keys.size("embedding_length")?;
        let config = Self {
            architecture,
            name: file
                .text_opt("general.name")?
                .unwrap_or(keys.prefix)
                .to_owned(),
            layers: keys.size("block_count")?,
            dim,
            ffn: keys.size("feed_forward_length")?,
            heads,
            kv_heads: keys.size_or("attention.head_count_kv", heads)?,
            head_dim: keys.size_or("attention.key_length", dim / heads)?,
            vocab: vocabulary(file)?,
            context: keys.context()?,
            eps: file.f32(&keys.key("attention.layer_norm_rms_epsilon"))?,
        };
        config.check(&keys)?;
        Ok(config)
    }

    /// Elements of all query heads together.
    #[must_use]
    pub fn q_width(&self) -> usize {
        self.heads as usize * self.head_dim as usize
    }

    /// Elements of all key heads together.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads as usize * self.head_dim as usize
    }

    fn check(&self, keys: &Keys<'_>) -> Result<(), EngineError> {
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(keys.unsupported(
                "attention.head_count_kv",
                &self.kv_heads,
                format!("a divisor of the {} query heads", self.heads),
            ));
        }
        if !self.head_dim.is_multiple_of(16) || self.head_dim > 256 || self.head_dim == 0 {
            return Err(keys.unsupported(
                "attention.key_length",
                &self.head_dim,
                "a multiple of 16 from 16 to 256",
            ));
        }
        let value_length = keys.size_or("attention.value_length", self.head_dim)?;
        if value_length != self.head_dim {
            return Err(keys.unsupported(
                "attention.value_length",
                &value_length,
                format!("the key length {}", self.head_dim),
            ));
        }
        let rotated = keys.size_or("rope.dimension_count", self.head_dim)?;
        if rotated != self.head_dim {
            return Err(keys.unsupported(
                "rope.dimension_count",
                &rotated,
                format!("the head width {}", self.head_dim),
            ));
        }
        if !(self.eps > 0.0 && self.eps < 1.0) {
            return Err(keys.unsupported(
                "attention.layer_norm_rms_epsilon",
                &self.eps,
                "a number between 0 and 1",
            ));
        }
        Ok(())
    }
}

/// Metadata keys under the family's prefix.
pub(super) struct Keys<'a> {
    pub(super) file: &'a Gguf,
    pub(super) prefix: &'static str,
}

impl Keys<'_> {
    pub(super) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    pub(super) fn unsupported(
        &self,
        name: &str,
        found: &dyn std::fmt::Display,
        wanted: impl Into<String>,
    ) -> EngineError {
        EngineError::Unsupported {
            key: self.key(name),
            found: found.to_string(),
            wanted: wanted.into(),
        }
    }

    fn checked(&self, name: &str, size: u32) -> Result<u32, EngineError> {
        if size == 0 || size > SIZE_MAX {
            return Err(self.unsupported(name, &size, format!("a number from 1 to {SIZE_MAX}")));
        }
        Ok(size)
    }

    fn size(&self, name: &str) -> Result<u32, EngineError> {
        self.checked(name, self.file.u32(&self.key(name))?)
    }

    fn size_or(&self, name: &str, default: u32) -> Result<u32, EngineError> {
        self.checked(name, self.file.u32_opt(&self.key(name))?.unwrap_or(default))
    }

    /// A sliding window is no limit as long as no request grows beyond it.
    fn context(&self) -> Result<u32, EngineError> {
        let context = self.size("context_length")?;
        let window = self
            .file
            .u32_opt(&self.key("attention.sliding_window"))?
            .unwrap_or(0);
        Ok(if window == 0 {
            context
        } else {
            context.min(window)
        })
    }

    fn refuse_extensions(&self) -> Result<(), EngineError> {
        let experts = self.file.u32_opt(&self.key("expert_count"))?.unwrap_or(0);
        if experts > 0 {
            return Err(self.unsupported("expert_count", &experts, "0, a dense model"));
        }
        for name in [
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "logit_scale",
        ] {
            if let Some(found) = self.file.f32_opt(&self.key(name))? {
                return Err(self.unsupported(name, &found, "no such key"));
            }
        }
        Ok(())
    }
}

/// The number of embedding rows decides; metadata may leave it out.
fn vocabulary(file: &Gguf) -> Result<u32, EngineError> {
    let name = "token_embd.weight";
    let tensor = file
        .tensor(name)
        .ok_or_else(|| EngineError::TensorMissing {
            name: name.to_owned(),
        })?;
    u32::try_from(tensor.info.rows())
        .ok()
        .filter(|&rows| rows <= SIZE_MAX)
        .ok_or_else(|| EngineError::Unsupported {
            key: name.to_owned(),
            found: format!("{} rows", tensor.info.rows()),
            wanted: format!("at most {SIZE_MAX} rows"),
        })
}
