//! Model runner for GGUF Llama-family models, one engine thread a replica.

#![deny(unsafe_code)]

pub mod gguf;
#[expect(unsafe_code, reason = "the memory map of model files")]
mod mmap;
