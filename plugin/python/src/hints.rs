//! What a request says, read once by the core's own reader and kept with the request.

use std::sync::Arc;

use pyo3::prelude::*;
use rootstock::hints;
use rootstock::ledger::About;
use rootstock::radix::TenantId;
use serde_json::Value;

use crate::failure::invalid;

/// The hints of one request.
#[pyclass(frozen, module = "rootstock")]
#[derive(Debug)]
pub(crate) struct Hints {
    pub(crate) about: Arc<About>,
    /// What it says, without whose it is.
    pub(crate) said: Arc<rootstock::radix::Hints>,
}

#[pymethods]
impl Hints {
    /// Reads `nvext` (JSON text of an object) leniently: what is not understood is in `ignored`.
    /// `prompt_tokens` and `block_tokens` say where the prompt ends and how long a block is.
    #[new]
    #[pyo3(signature = (nvext, *, tenant = 0, prompt_tokens = 0, block_tokens = 16))]
    fn new(nvext: &str, tenant: u32, prompt_tokens: u32, block_tokens: u32) -> PyResult<Self> {
        let nvext: Value = serde_json::from_str(nvext).map_err(invalid)?;
        let parsed = hints::parse(&nvext, &Value::Null, &[]);
        let said = Arc::new(parsed.hints.clone());
        let about = About::new(parsed.hints, TenantId(tenant), prompt_tokens, block_tokens);
        Ok(Self {
            about: Arc::new(about),
            said,
        })
    }

    /// Importance for eviction and preemption; higher is more important.
    #[getter]
    fn priority(&self) -> i32 {
        self.about.hints.priority
    }

    /// Queue tier; higher goes first.
    #[getter]
    fn strict(&self) -> u32 {
        self.about.hints.strict
    }

    /// Seconds by which the request may overtake others.
    #[getter]
    fn jump_s(&self) -> f64 {
        self.about.hints.jump_s
    }

    /// The program that it belongs to.
    #[getter]
    fn program(&self) -> Option<&str> {
        self.about.hints.program.as_deref()
    }

    /// Whether it is the last request of its program.
    #[getter]
    fn session_final(&self) -> bool {
        self.about.hints.session_final
    }

    /// How many prefixes it asks to pin.
    #[getter]
    fn pins(&self) -> usize {
        self.about.hints.pins.len()
    }

    /// Those prefixes: tokens (at most those of the prompt) and seconds.
    #[getter]
    fn pin_spans(&self) -> Vec<(u32, u64)> {
        let pins = self.about.hints.pins.iter();
        pins.map(|&(tokens, ttl)| (tokens, ttl.seconds)).collect()
    }

    /// Fields that were not understood, with the reason.
    #[getter]
    fn ignored(&self) -> Vec<String> {
        self.about.hints.ignored.clone()
    }
}
