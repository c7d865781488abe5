//! Errors of the core as Python exceptions.

use std::fmt::Display;

use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use rootstock::radix::PolicyKind;

/// A value that cannot be.
pub(crate) fn invalid(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A lock that a panic left behind.
pub(crate) fn poisoned<T>(_: T) -> PyErr {
    PyRuntimeError::new_err("a call panicked before: make a new object")
}

/// A policy by its name.
pub(crate) fn policy(name: &str) -> Result<PolicyKind, PyErr> {
    let quoted = serde_json::Value::from(name);
    serde_json::from_value(quoted).map_err(|_| {
        invalid(format!(
            "policy is {name:?}, one of agent, lru, priority, lfu, fifo, filo, mru, slru is \
             possible"
        ))
    })
}
