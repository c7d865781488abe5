//! The weights of a model on a device.
//!
//! Floats keep their type; quantized tensors become F16, by the device. Tensors are checked
//! against the metadata as for the CPU.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rootstock_kernels::cuda::{
    Device, DeviceBuffer, DeviceMatrix, GeneralKernels, RopeAngles, Stream,
};
use rootstock_kernels::{GgmlType, Isa, RopeStyle};

use crate::error::EngineError;
use crate::gguf::Gguf;
use crate::model::{Job, ModelConfig, RopeTable, Source};

/// A matrix and its optional bias.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) weight: DeviceMatrix,
    pub(super) bias: Option<DeviceBuffer<f32>>,
}

/// The weights of one layer, named as those of the CPU.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attn_norm: DeviceBuffer<f32>,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) q_norm: Option<DeviceBuffer<f32>>,
    pub(super) k_norm: Option<DeviceBuffer<f32>>,
    pub(super) attn_out: Linear,
    pub(super) ffn_norm: DeviceBuffer<f32>,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

/// A model on a device.
#[derive(Debug)]
pub struct CudaModel {
    device: Device,
    kernels: Arc<GeneralKernels>,
    code_cache: Option<PathBuf>,
    config: ModelConfig,
    pub(super) halves: bool,
    pub(super) angles: RopeAngles,
    pub(super) embedding: DeviceMatrix,
    pub(super) layers: Vec<Layer>,
    pub(super) output_norm: DeviceBuffer<f32>,
    /// None: tied to the embedding.
    output: Option<DeviceMatrix>,
}

impl CudaModel {
    /// Loads the model of a file, for requests of up to `positions` positions (None: all that the
    /// model has); `code_cache` is the folder of compiled kernels.
    ///
    /// # Errors
    /// Names the metadata key or the tensor that is missing, misshapen or of an unknown type; no
    /// memory on the device.
    pub fn load(
        file: &Gguf,
        device: &Device,
        positions: Option<u32>,
        code_cache: Option<PathBuf>,
    ) -> Result<Self, EngineError> {
        let config = ModelConfig::read(file)?;
        let rope = RopeTable::read(file, &config)?;
        let kernels = Arc::new(GeneralKernels::load(device, code_cache.as_deref())?);
        let positions = positions.unwrap_or(config.context).min(config.context);
        let stream = Stream::new(device)?;
        let source = Source {
            file,
            config: &config,
            // Not packed, so of no consequence.
            isa: Isa::Scalar,
        };
        let loader = Loader {
            source: &source,
            stream: &stream,
            kernels: &kernels,
        };
        let mut jobs = source.jobs().into_iter();
        let mut next = || match jobs.next() {
            Some(job) => loader.matrix(&job),
            None => Err(EngineError::TensorMissing {
                name: "weights".to_owned(),
            }),
        };
        let embedding = next()?;
        let output = match file.tensor("output.weight") {
            Some(_) => Some(next()?),
            None => None,
        };
        let mut layers = Vec::new();
        for index in 0..config.layers {
            layers.push(loader.layer(index, &mut next)?);
        }
        Ok(Self {
            output_norm: loader.vector("output_norm.weight", config.dim as usize)?,
            angles: RopeAngles::new(&stream, &rope.freqs, positions, rope.magnitude)?,
            halves: rope.style == RopeStyle::Neox,
            device: device.clone(),
            embedding,
            output,
            layers,
            code_cache,
            kernels: Arc::clone(&kernels),
            config: config.clone(),
        })
    }

    /// Sizes and constants.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The device it is on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes of all weight matrices.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        let layers: usize = self.layers.iter().map(Layer::bytes).sum();
        let ends = self.embedding.bytes() + self.output.as_ref().map_or(0, DeviceMatrix::bytes);
        (layers + ends) as u64
    }

    pub(super) fn kernels(&self) -> &Arc<GeneralKernels> {
        &self.kernels
    }

    pub(super) fn code_cache(&self) -> Option<&Path> {
        self.code_cache.as_deref()
    }

    /// The matrix that turns the last hidden state into logits.
    pub(super) fn head(&self) -> &DeviceMatrix {
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

struct Loader<'a> {
    source: &'a Source<'a>,
    stream: &'a Stream,
    kernels: &'a GeneralKernels,
}

impl Loader<'_> {
    fn matrix(&self, job: &Job) -> Result<DeviceMatrix, EngineError> {
        let tensor = self
            .source
            .tensor(&job.name, &[job.cols as u64, job.rows as u64])?;
        let wrap = |source| EngineError::Pack {
            name: job.name.clone(),
            source,
        };
        let ty = GgmlType::from_id(tensor.info.ty().id()).map_err(wrap)?;
        let size = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
        let (rows, cols) = (size(job.rows), size(job.cols));
        Ok(self
            .kernels
            .matrix(self.stream, ty, rows, cols, tensor.data)?)
    }

    fn vector(&self, name: &str, len: usize) -> Result<DeviceBuffer<f32>, EngineError> {
        let values = self.source.vector(name, len)?;
        Ok(self.stream.upload_now(&values, "weights")?)
    }

    fn vector_opt(&self, name: &str, len: usize) -> Result<Option<DeviceBuffer<f32>>, EngineError> {
        match self.source.vector_opt(name, len)? {
            Some(values) => Ok(Some(self.stream.upload_now(&values, "weights")?)),
            None => Ok(None),
        }
    }

    fn layer(
        &self,
        index: u32,
        next: &mut dyn FnMut() -> Result<DeviceMatrix, EngineError>,
    ) -> Result<Layer, EngineError> {
        let c = self.source.config;
        let (dim, ffn) = (c.dim as usize, c.ffn as usize);
        let name = |part: &str| format!("blk.{index}.{part}");
        let mut linear = |part: &str, rows: usize| -> Result<Linear, EngineError> {
            Ok(Linear {
                bias: self.vector_opt(&name(&format!("{part}.bias")), rows)?,
                weight: next()?,
            })
        };
        Ok(Layer {
            q: linear("attn_q", c.q_width())?,
            k: linear("attn_k", c.kv_width())?,
            v: linear("attn_v", c.kv_width())?,
            attn_out: linear("attn_output", dim)?,
            gate: linear("ffn_gate", ffn)?,
            up: linear("ffn_up", ffn)?,
            down: linear("ffn_down", dim)?,
            attn_norm: self.vector(&name("attn_norm.weight"), dim)?,
            ffn_norm: self.vector(&name("ffn_norm.weight"), dim)?,
            q_norm: self.vector_opt(&name("attn_q_norm.weight"), c.head_dim as usize)?,
            k_norm: self.vector_opt(&name("attn_k_norm.weight"), c.head_dim as usize)?,
        })
    }
}
