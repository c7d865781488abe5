//! What crosses between Python and the tree: buffers of 64-bit integers, actions and events as
//! tuples, mistakes as exceptions.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyAssertionError, PyKeyError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyTuple};
use rootstock::radix::slots::{Freed, Handle, SlotAction, SlotError, SlotEvent};

use crate::failure::invalid;

pub(super) type Bytes = Py<PyByteArray>;
pub(super) type FreedSlots = (Vec<Bytes>, Vec<Bytes>, usize, usize);

pub(super) fn failed(error: SlotError) -> PyErr {
    match error {
        SlotError::Missing(_) => PyKeyError::new_err(error.to_string()),
        SlotError::Insertion(_) => PyRuntimeError::new_err(error.to_string()),
        SlotError::State { .. } => PyAssertionError::new_err(error.to_string()),
        SlotError::Length { .. } | _ => invalid(error),
    }
}

/// Whole pages of a key. It ends before a token that is no 32-bit id: what comes after is not
/// cached.
pub(super) fn tokens_of(
    py: Python<'_>,
    key: &Bound<'_, PyAny>,
    page_tokens: usize,
) -> PyResult<Vec<u32>> {
    let wide = longs(py, key, "the key")?;
    let mut tokens = Vec::with_capacity(wide.len());
    tokens.extend(wide.iter().map_while(|&token| u32::try_from(token).ok()));
    tokens.truncate(tokens.len() / page_tokens * page_tokens);
    Ok(tokens)
}

pub(super) fn longs(py: Python<'_>, from: &Bound<'_, PyAny>, what: &str) -> PyResult<Vec<i64>> {
    // An empty array has no address that a buffer could name.
    if from.len().is_ok_and(|len| len == 0) {
        return Ok(Vec::new());
    }
    let buffer = PyBuffer::<i64>::get(from)
        .map_err(|_| invalid(format!("{what} is no buffer of 64-bit integers")))?;
    buffer.to_vec(py)
}

pub(super) fn bytes(py: Python<'_>, slots: &[i64]) -> Bytes {
    PyByteArray::new(py, bytemuck::cast_slice(slots)).unbind()
}

pub(super) fn freed(py: Python<'_>, freed: &Freed) -> FreedSlots {
    let all = |lists: &[Vec<i64>]| lists.iter().map(|slots| bytes(py, slots)).collect();
    let (device, host) = (all(&freed.device), all(&freed.host));
    (device, host, freed.tokens, freed.unbacked)
}

pub(super) fn ids(handles: &[Handle]) -> Vec<u64> {
    handles.iter().map(|handle| handle.0).collect()
}

pub(super) fn handles(ids: &[u64]) -> Vec<Handle> {
    ids.iter().map(|&id| Handle(id)).collect()
}

/// An action as a tuple that starts with its name.
pub(super) fn action<'py>(py: Python<'py>, action: &SlotAction) -> PyResult<Bound<'py, PyTuple>> {
    match action {
        SlotAction::Free(slots) => ("free", bytes(py, slots)).into_pyobject(py),
        SlotAction::BackUp(nodes) => ("backup", ids(nodes)).into_pyobject(py),
        SlotAction::Split { ack, upper, lower } => {
            ("split", ack, upper.0, lower.0).into_pyobject(py)
        }
    }
}

pub(super) fn actions(py: Python<'_>, all: &[SlotAction]) -> PyResult<Vec<Py<PyTuple>>> {
    let tuples = all.iter().map(|one| action(py, one).map(Bound::unbind));
    tuples.collect()
}

pub(super) fn event<'py>(py: Python<'py>, event: SlotEvent) -> PyResult<Bound<'py, PyTuple>> {
    match event {
        SlotEvent::Stored {
            space,
            hashes,
            parent,
            tokens,
            device,
            session,
        } => (
            "stored",
            (space.extra, space.salt),
            hashes,
            device,
            parent,
            tokens,
            session,
        )
            .into_pyobject(py),
        SlotEvent::Removed {
            space,
            hashes,
            device,
        } => ("removed", (space.extra, space.salt), hashes, device).into_pyobject(py),
    }
}
