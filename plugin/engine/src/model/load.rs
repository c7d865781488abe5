//! Reading and repacking the weights, in parallel over tensors.
//!
//! Each tensor is checked against the shape that the metadata implies before a byte of it is
//! used. Matrices are repacked for the instruction set; norms and biases become plain floats.
//! Work is handed out tensor by tensor from one counter; results land in their own cell, so the
//! order of threads changes nothing.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rootstock_kernels::{GgmlType, Isa, KernelError, PackedMatrix, WeightRoom};

use super::{Layer, Linear, Model, ModelConfig, RopeTable, Weights};
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
        };
        let jobs = source.jobs();
        let mut packed = pack_all(&source, &jobs, isa, threads)?.into_iter();
        let mut next = || {
            packed.next().ok_or_else(|| EngineError::TensorMissing {
                name: "weights".to_owned(),
            })
        };
        let weights = source.weights(&mut next, &Ok)?;
        Ok(Self {
            rope,
            embedding: weights.embedding,
            output: weights.output,
            layers: weights.layers,
            output_norm: weights.output_norm,
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

impl Job {
    fn refused(&self, source: KernelError) -> EngineError {
        EngineError::Pack {
            name: self.name.clone(),
            source,
        }
    }
}

/// A file's tensors, checked against its metadata.
pub(crate) struct Source<'a> {
    pub(crate) file: &'a Gguf,
    pub(crate) config: &'a ModelConfig,
}

/// Brings a vector of the file to where the weights are.
type Place<'a, V> = &'a dyn Fn(Vec<f32>) -> Result<V, EngineError>;

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

    /// All weights: matrices from `next`, in the order of the jobs, and vectors by `place`.
    ///
    /// # Errors
    /// Names the tensor that is missing or misshapen; those of `next` and `place`.
    pub(crate) fn weights<M, V>(
        &self,
        next: &mut dyn FnMut() -> Result<M, EngineError>,
        place: Place<'_, V>,
    ) -> Result<Weights<M, V>, EngineError> {
        let embedding = next()?;
        let output = match self.file.tensor("output.weight") {
            Some(_) => Some(next()?),
            None => None,
        };
        let mut layers = Vec::with_capacity(self.config.layers as usize);
        for index in 0..self.config.layers {
            layers.push(self.layer(index, next, place)?);
        }
        let output_norm = self.vector("output_norm.weight", self.config.dim as usize)?;
        Ok(Weights {
            embedding,
            output,
            layers,
            output_norm: place(output_norm)?,
        })
    }

    fn layer<M, V>(
        &self,
        index: u32,
        next: &mut dyn FnMut() -> Result<M, EngineError>,
        place: Place<'_, V>,
    ) -> Result<Layer<M, V>, EngineError> {
        let c = self.config;
        let (dim, ffn) = (c.dim as usize, c.ffn as usize);
        let name = |part: &str| format!("blk.{index}.{part}");
        let vector = |part: &str, len| place(self.vector(&name(part), len)?);
        let vector_opt = |part: &str, len| match self.vector_opt(&name(part), len)? {
            Some(values) => place(values).map(Some),
            None => Ok(None),
        };
        let mut linear = |part: &str, rows: usize| -> Result<Linear<M, V>, EngineError> {
            Ok(Linear {
                bias: vector_opt(&format!("{part}.bias"), rows)?,
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
            attn_norm: vector("attn_norm.weight", dim)?,
            ffn_norm: vector("ffn_norm.weight", dim)?,
            q_norm: vector_opt("attn_q_norm.weight", c.head_dim as usize)?,
            k_norm: vector_opt("attn_k_norm.weight", c.head_dim as usize)?,
        })
    }

    fn tensor(&self, name: &str, wanted: &[u64]) -> Result<TensorView<'_>, EngineError> {
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

    fn vector_opt(&self, name: &str, len: usize) -> Result<Option<Vec<f32>>, EngineError> {
        if self.file.tensor(name).is_none() {
            return Ok(None);
        }
        self.vector(name, len).map(Some)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, EngineError> {
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

    /// The bytes of a matrix, whose shape is the one asked for, and their type.
    ///
    /// # Errors
    /// Names the tensor that is missing, misshapen or of an unknown type.
    pub(crate) fn matrix(&self, job: &Job) -> Result<(GgmlType, &[u8]), EngineError> {
        let tensor = self.tensor(&job.name, &[job.cols as u64, job.rows as u64])?;
        let ty = GgmlType::from_id(tensor.info.ty().id()).map_err(|source| job.refused(source))?;
        Ok((ty, tensor.data))
    }

    fn pack(&self, job: &Job, isa: Isa, room: &WeightRoom) -> Result<PackedMatrix, EngineError> {
        let (ty, data) = self.matrix(job)?;
        PackedMatrix::pack_in(room, (ty, job.rows, job.cols), data, isa)
            .map_err(|source| job.refused(source))
    }
}

/// Packs all jobs; the first failure in the order of the jobs is the one reported.
fn pack_all(
    source: &Source<'_>,
    jobs: &[Job],
    isa: Isa,
    threads: usize,
) -> Result<Vec<PackedMatrix>, EngineError> {
    let cells: Vec<OnceLock<Result<PackedMatrix, EngineError>>> =
        jobs.iter().map(|_| OnceLock::new()).collect();
    let (taken, room) = (AtomicUsize::new(0), WeightRoom::default());
    let work = || {
        loop {
            let at = taken.fetch_add(1, Ordering::Relaxed);
            let (Some(job), Some(cell)) = (jobs.get(at), cells.get(at)) else {
                break;
            };
            let fresh = cell.set(source.pack(job, isa, &room)).is_ok();
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
