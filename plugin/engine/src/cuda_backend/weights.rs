//! The weights of a model on a device.
//!
//! Floats keep their type, and quantized formats their blocks. Tensors are checked against the
//! metadata as for the CPU.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rootstock_kernels::RopeStyle;
use rootstock_kernels::cuda::{
    Device, DeviceBuffer, DeviceMatrix, GeneralKernels, RopeAngles, Stream,
};

use crate::error::EngineError;
use crate::gguf::Gguf;
use crate::model::{self, ModelConfig, RopeTable, Source};

/// The weights of one layer, as those of the CPU.
pub(super) type Layer = model::Layer<DeviceMatrix, DeviceBuffer<f32>>;

/// A matrix and its optional bias.
pub(super) type Linear = model::Linear<DeviceMatrix, DeviceBuffer<f32>>;

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
        let positions = positions.unwrap_or(config.context);
        let stream = Stream::new(device)?;
        let source = Source {
            file,
            config: &config,
        };
        let mut jobs = source.jobs().into_iter();
        let mut next = || {
            let job = jobs.next().ok_or_else(|| EngineError::TensorMissing {
                name: "weights".to_owned(),
            })?;
            let (ty, data) = source.matrix(&job)?;
            let size = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
            Ok(kernels.matrix(&stream, ty, size(job.rows), size(job.cols), data)?)
        };
        let place = |values: Vec<f32>| Ok(stream.upload_now(&values, "weights")?);
        let weights = source.weights(&mut next, &place)?;
        Ok(Self {
            angles: RopeAngles::new(&stream, &rope.freqs, positions, rope.magnitude)?,
            halves: rope.style == RopeStyle::Neox,
            device: device.clone(),
            embedding: weights.embedding,
            output: weights.output,
            layers: weights.layers,
            output_norm: weights.output_norm,
            code_cache,
            kernels,
            config,
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
        let layers = self.layers.iter().flat_map(Layer::matrices);
        let ends = std::iter::once(&self.embedding).chain(&self.output);
        layers.chain(ends).map(DeviceMatrix::bytes).sum::<usize>() as u64
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
