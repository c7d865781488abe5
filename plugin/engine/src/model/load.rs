//! Reading and repacking the weights, in parallel over tensors.
//!
//! Each tensor is checked against the shape that the metadata implies before a byte of it is
//! used. Matrices are repacked for the instruction set; norms and biases become plain floats.
//! Work is handed out tensor by tensor from one counter; results land in their own cell, so the
//! order of threads changes nothing.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rootstock_kernels::{GgmlType, Isa, PackedMatrix};

use super::{Layer, Linear, Model, ModelConfig, RopeTable};
use crate::error::EngineError;
use crate::gguf::{Gguf, TensorView};

const VECTOR_TYPES: &str = "F32, F16 or BF16";

/// Cells of matrices a layer has: q k v out gate up down.
const MATRICES: usize = 7;

impl Model {
    /// Loads the model of a file, packing on up to `threads` threads.
    ///
    /// # Errors
    /// Names the metadata key or the tensor that is missing, misshapen or of an unknown type.
    ///
    /// # Cost
    /// Reads every weight once; memory for the packed copy, about the size of the file.
    pub fn load(file: &Gguf, isa: Isa, threads: usize) -> Result<Self, EngineError> {
        let config = ModelConfig::read(file)?;
        let rope = RopeTable::read(file, &config)?;
        let source = Source {
            file,
            config: &config,
            isa,
        };
        let jobs = source.jobs();
        let mut packed = pack_all(&source, &jobs, threads)?.into_iter();
        let mut next = || {
            packed.next().ok_or_else(|| EngineError::TensorMissing {
                name: "weights".to_owned(),
            })
        };
        let embedding = next()?;
        let output = if file.tensor("output.weight").is_some() {
            Some(next()?)
        } else {
            None
        };
        let mut layers = Vec::with_capacity(config.layers as usize);
        for index in 0..config.layers {
            layers.push(source.layer(index, &mut next)?);
        }
        let output_norm = source.vector("output_norm.weight", config.dim as usize)?;
        Ok(Self {
            rope,
            embedding,
            layers,
            output_norm,
            output,
            isa,
            config,
        })
    }
}

/// One matrix to load.
pub(crate) struct Job {
    pub(crate) name: String,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// A file's tensors, checked against its metadata.
pub(crate) struct Source<'a> {
    pub(crate) file: &'a Gguf,
    pub(crate) config: &'a ModelConfig,
    /// What matrices are packed for.
    pub(crate) isa: Isa,
}

impl Source<'_> {
    /// All matrices: embedding, output if there is one, then `MATRICES` a layer.
    pub(crate) fn jobs(&self) -> Vec<Job> {
        let c = self.config;
        let (dim, ffn) = (c.dim as usize, c.ffn as usize);
        let job = |name: &str, rows, cols| Job {
            name: name.to_owned(),
            rows,
            cols,
        };
        let mut jobs = vec![job("token_embd.weight", c.vocab as usize, dim)];
        if self.file.tensor("output.weight").is_some() {
            jobs.push(job("output.weight", c.vocab as usize, dim));
        }
        for layer in 0..c.layers {
            let shapes: [(&str, usize, usize); MATRICES] = [
                ("attn_q", c.q_width(), dim),
                ("attn_k", c.kv_width(), dim),
                ("attn_v", c.kv_width(), dim),
                ("attn_output", dim, c.q_width()),
                ("ffn_gate", ffn, dim),
                ("ffn_up", ffn, dim),
                ("ffn_down", dim, ffn),
            ];
            for (name, rows, cols) in shapes {
                jobs.push(Job {
                    name: format!("blk.{layer}.{name}.weight"),
                    rows,
                    cols,
                });
            }
        }
        jobs
    }

    fn layer(
        &self,
        index: u32,
        next: &mut dyn FnMut() -> Result<PackedMatrix, EngineError>,
    ) -> Result<Layer, EngineError> {
        let c = self.config;
        let (dim, ffn) = (c.dim as usize, c.ffn as usize);
        let name = |part: &str| format!("blk.{index}.{part}");
        let mut linear = |part: &str, rows: usize| -> Result<Linear, EngineError> {
            let bias = self.vector_opt(&name(&format!("{part}.bias")), rows)?;
            Ok(Linear {
                weight: next()?,
                bias,
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

    pub(crate) fn tensor(&self, name: &str, wanted: &[u64]) -> Result<TensorView<'_>, EngineError> {
        let tensor = self
            .file
            .tensor(name)
            .ok_or_else(|| EngineError::TensorMissing {
                name: name.to_owned(),
            })?;
        if tensor.info.shape() != wanted {
            return Err(EngineError::TensorShape {
                name: name.to_owned(),
                found: tensor.info.shape().to_vec(),
                wanted: wanted.to_vec(),
            });
        }
        Ok(tensor)
    }

    pub(crate) fn vector_opt(
        &self,
        name: &str,
        len: usize,
    ) -> Result<Option<Vec<f32>>, EngineError> {
        if self.file.tensor(name).is_none() {
            return Ok(None);
        }
        self.vector(name, len).map(Some)
    }

    pub(crate) fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError> {
        let tensor = self.tensor(name, &[len as u64])?;
        let refused = || EngineError::TensorType {
            name: name.to_owned(),
            found: tensor.info.ty().name().to_owned(),
            wanted: VECTOR_TYPES,
        };
        let ty = GgmlType::from_id(tensor.info.ty().id()).map_err(|_| refused())?;
        if tensor.info.ty().block_values() != 1 {
            return Err(refused());
        }
        let mut out = vec![0.0; len];
        rootstock_kernels::dequantize(ty, tensor.data, &mut out).map_err(|source| {
            EngineError::Pack {
                name: name.to_owned(),
                source,
            }
        })?;
        Ok(out)
    }

    fn pack(&self, job: &Job) -> Result<PackedMatrix, EngineError> {
        let tensor = self.tensor(&job.name, &[job.cols as u64, job.rows as u64])?;
        let wrap = |source| EngineError::Pack {
            name: job.name.clone(),
            source,
        };
        let ty = GgmlType::from_id(tensor.info.ty().id()).map_err(wrap)?;
        PackedMatrix::pack(ty, job.rows, job.cols, tensor.data, self.isa).map_err(wrap)
    }
}

/// Packs all jobs; the first failure in the order of the jobs is the one reported.
fn pack_all(
    source: &Source<'_>,
    jobs: &[Job],
    threads: usize,
) -> Result<Vec<PackedMatrix>, EngineError> {
    let cells: Vec<OnceLock<Result<PackedMatrix, EngineError>>> =
        jobs.iter().map(|_| OnceLock::new()).collect();
    let taken = AtomicUsize::new(0);
    let work = || {
        loop {
            let at = taken.fetch_add(1, Ordering::Relaxed);
            let (Some(job), Some(cell)) = (jobs.get(at), cells.get(at)) else {
                break;
            };
            let fresh = cell.set(source.pack(job)).is_ok();
            debug_assert!(fresh, "each job is taken once");
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.clamp(1, 16) {
            scope.spawn(work);
        }
        work();
    });
    jobs.iter()
        .zip(cells)
        .map(|(job, cell)| {
            let missing = || {
                Err(EngineError::TensorMissing {
                    name: job.name.clone(),
                })
            };
            cell.into_inner().unwrap_or_else(missing)
        })
        .collect()
}

/// Little-endian floats of a plain tensor.
pub(super) fn floats(data: &[u8]) -> Vec<f32> {
    data.chunks_exact(4)
        .map(|four| f32::from_le_bytes(four.try_into().unwrap_or_default()))
        .collect()
}
