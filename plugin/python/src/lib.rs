//! The module `_rootstock` of the Python package `rootstock`.
//!
//! Two classes carry it: [`cache::Cache`], the prefix cache over buffers of token ids, and
//! [`blocks::Blocks`], the same cache for engines that count references to blocks (what
//! `rootstock.vllm` grafts into vLLM). Every mistake is a Python exception with its numbers, and
//! no call keeps an object of the caller.

mod blocks;
mod cache;
mod clock;
mod failure;
mod hints;

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

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
