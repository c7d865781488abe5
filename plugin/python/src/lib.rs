//! The module `_rootstock` of the Python package `rootstock`.
//!
//! Three classes carry it: [`cache::Cache`], the prefix cache over buffers of token ids,
//! [`blocks::Blocks`], the same cache for engines that count references to blocks (what
//! `rootstock.vllm` grafts into vLLM), and [`slots::SlotTree`] for engines that own their slots
//! (`rootstock.sglang`). Every mistake is a Python exception with its numbers, and
//! no call keeps an object of the caller.

mod blocks;
mod cache;
mod clock;
mod failure;
mod hints;
mod slots;

use pyo3::prelude::*;

/// What `import _rootstock` gives.
#[pymodule]
mod _rootstock {
    use super::*;

    #[pymodule_export]
    use super::blocks::{Block, Blocks, count_idle};
    #[pymodule_export]
    use super::cache::Cache;
    #[pymodule_export]
    use super::hints::Hints;
    #[pymodule_export]
    use super::slots::SlotTree;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
