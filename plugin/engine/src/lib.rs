//! Model runner for GGUF Llama-family models: the model's mathematics on the CPU, and the service
//! that joins it with the serving core.
//!
//! Layers, from the file to the client: `model` reads sizes and weights, `cpu_backend` runs step
//! plans over a paged KV arena, `service` owns the core thread and one engine thread a replica.
//! Text (tokenizer, chat template, history) lives beside them and knows nothing of steps.

#![deny(unsafe_code)]

pub mod constrained;
pub mod cpu_backend;
#[cfg(feature = "cuda")]
pub mod cuda_backend;
pub mod error;
pub mod gguf;
pub mod history;
#[expect(unsafe_code, reason = "the memory map of model files")]
mod mmap;
pub mod model;
pub mod model_source;
pub mod service;
pub mod template;
pub mod text;
pub mod tokenizer;

pub use rootstock_kernels as kernels;
