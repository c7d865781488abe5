//! Buffers that kernel calls reuse, so that a warm step allocates nothing.

use super::act::Act;
use super::attention::{Task, Workspace};

/// Working memory of one caller; grows to the largest step seen and never shrinks.
#[derive(Default)]
pub struct Scratch {
    /// Quantized rows of a product's input.
    pub(crate) acts: Vec<Act>,
    /// Rows of a product's input as floats, where they had to be computed.
    pub(crate) dense: Vec<f32>,
    /// Tasks of an attention call.
    pub(crate) tasks: Vec<Task>,
    /// Attention's buffers of each thread.
    pub(crate) workspaces: Vec<Workspace>,
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scratch")
            .field("acts", &self.acts.len())
            .field("dense", &self.dense.len())
            .field("workspaces", &self.workspaces.len())
            .finish_non_exhaustive()
    }
}
