//! Rotary frequencies as the file asks for them.
//!
//! A table holds one angle per position and pair, in radians. Scaling only changes the table:
//! linear divides it, factors of the file (Llama 3) divide each pair by its own number, YaRN
//! blends both ends and scales the magnitude of the rotated vectors. Formulas: the YaRN paper
//! (arXiv 2309.00071), appendix A.2, with the constants that GGUF files imply (32 and 1 turns).

use rootstock_kernels::RopeStyle;

use super::config::{Architecture, Keys, ModelConfig};
use crate::error::EngineError;
use crate::gguf::{Gguf, TensorType};

const FACTORS: &str = "rope_freqs.weight";

/// How positions rotate heads.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// Radians per position, one per pair.
    pub freqs: Vec<f32>,
    /// Factor on the rotated vectors; 1 but for YaRN.
    pub magnitude: f32,
    /// Which elements of a head form a pair.
    pub style: RopeStyle,
}

impl RopeTable {
    /// Reads the rotary settings of a file.
    ///
    /// # Errors
    /// A scaling this engine does not compute, by name.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "angles are computed in f64, kept in f32"
    )]
    pub fn read(file: &Gguf, config: &ModelConfig) -> Result<Self, EngineError> {
        let keys = Keys {
            file,
            prefix: config.architecture.name(),
        };
        let pairs = config.head_dim / 2;
        let base = f64::from(
            keys.file
                .f32_opt(&keys.key("rope.freq_base"))?
                .unwrap_or(1e4),
        );
        if base.is_nan() || base <= 1.0 {
            return Err(keys.unsupported("rope.freq_base", &base, "a number above 1"));
        }
        let mut freqs: Vec<f64> = (0..pairs)
            .map(|pair| base.powf(-2.0 * f64::from(pair) / f64::from(config.head_dim)))
            .collect();
        for (freq, factor) in freqs.iter_mut().zip(factors(file, pairs)?) {
            *freq /= f64::from(factor);
        }
        let magnitude = scale(&keys, config, base, &mut freqs)?;
        let style = match config.architecture {
            Architecture::Llama => RopeStyle::Norm,
            Architecture::Qwen2 | Architecture::Qwen3 => RopeStyle::Neox,
        };
        Ok(Self {
            freqs: freqs.iter().map(|&freq| freq as f32).collect(),
            magnitude,
            style,
        })
    }
}

/// Applies the file's scaling to the table; returns the magnitude.
#[expect(
    clippy::cast_possible_truncation,
    reason = "computed in f64, kept in f32"
)]
fn scale(
    keys: &Keys<'_>,
    config: &ModelConfig,
    base: f64,
    freqs: &mut [f64],
) -> Result<f32, EngineError> {
    let file = keys.file;
    let factor = match file.f32_opt(&keys.key("rope.scaling.factor"))? {
        Some(factor) => factor,
        None => file.f32_opt(&keys.key("rope.scale_linear"))?.unwrap_or(1.0),
    };
    if !(1.0..=1e4).contains(&factor) {
        return Err(keys.unsupported("rope.scaling.factor", &factor, "a number from 1 to 10000"));
    }
    let factor = f64::from(factor);
    match file
        .text_opt(&keys.key("rope.scaling.type"))?
        .unwrap_or("linear")
    {
        "none" => Ok(1.0),
        "linear" => {
            freqs.iter_mut().for_each(|freq| *freq /= factor);
            Ok(1.0)
        }
        "yarn" => {
            let original = keys
                .file
                .u32_opt(&keys.key("rope.scaling.original_context_length"))?
                .unwrap_or(config.context);
            let attention = f64::from(
                file.f32_opt(&keys.key("rope.scaling.attn_factor"))?
                    .unwrap_or(1.0),
            );
            let (low, high) = yarn_ends(f64::from(config.head_dim), base, f64::from(original));
            for (pair, freq) in (0_u32..).zip(freqs.iter_mut()) {
                let ramp = (f64::from(pair) - low) / (high - low).max(0.001);
                let ramp = ramp.clamp(0.0, 1.0);
                *freq = *freq / factor * ramp + *freq * (1.0 - ramp);
            }
            Ok((attention * (1.0 + 0.1 * factor.ln())) as f32)
        }
        other => Err(keys.unsupported("rope.scaling.type", &other, "none, linear or yarn")),
    }
}

/// First and last pair of the blend.
fn yarn_ends(head_dim: f64, base: f64, original: f64) -> (f64, f64) {
    let turns =
        |n: f64| head_dim * (original / (n * 2.0 * std::f64::consts::PI)).ln() / (2.0 * base.ln());
    (
        turns(32.0).floor().max(0.0),
        turns(1.0).ceil().min(head_dim - 1.0),
    )
}

/// Divisors per pair; empty when the file has none.
fn factors(file: &Gguf, pairs: u32) -> Result<Vec<f32>, EngineError> {
    let Some(tensor) = file.tensor(FACTORS) else {
        return Ok(Vec::new());
    };
    let wanted = vec![u64::from(pairs)];
    if tensor.info.shape() != wanted {
        let found = tensor.info.shape().to_vec();
        return Err(EngineError::TensorShape {
            name: FACTORS.to_owned(),
            found,
            wanted,
        });
    }
    if tensor.info.ty() != TensorType::F32 {
        let found = tensor.info.ty().name().to_owned();
        return Err(EngineError::TensorType {
            name: FACTORS.to_owned(),
            found,
            wanted: "F32",
        });
    }
    let values: Vec<f32> = super::load::floats(tensor.data);
    if let Some(bad) = values
        .iter()
        .find(|value| !value.is_finite() || **value <= 0.0)
    {
        return Err(EngineError::Unsupported {
            key: FACTORS.to_owned(),
            found: bad.to_string(),
            wanted: "positive numbers".to_owned(),
        });
    }
    Ok(values)
}
