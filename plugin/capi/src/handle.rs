//! Handles: a value of ours behind a pointer of the host's.
//!
//! The lock makes misuse an answer instead of a race: a second thread gets
//! `ROOTSTOCK_STATUS_BUSY`, and a panic poisons the lock, so that a value left half changed is
//! never used again.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, TryLockError};

use crate::args::Host;
use crate::status::{Failure, RootstockStatus, finish};

/// What a pointer of the host's points to.
#[derive(Debug)]
pub(crate) struct Handle<T>(Mutex<T>);

impl<T> Handle<T> {
    pub(crate) fn new(value: T) -> *mut Self {
        Box::into_raw(Box::new(Self(Mutex::new(value))))
    }
}

/// Runs a call on what a handle points to.
pub(crate) fn with<T>(
    _host: Host,
    handle: *const Handle<T>,
    call: impl FnOnce(&mut T) -> Result<(), Failure>,
) -> RootstockStatus {
    // SAFETY: the host promises a live handle or null.
    let Some(handle) = (unsafe { handle.as_ref() }) else {
        return finish(Err(Failure::invalid("the handle is null")));
    };
    guard(|| match handle.0.try_lock() {
        Ok(mut value) => call(&mut value),
        Err(TryLockError::Poisoned(_)) => Err(Failure(
            RootstockStatus::Panicked,
            "an earlier call on this handle panicked; free it".to_owned(),
        )),
        Err(TryLockError::WouldBlock) => Err(Failure(
            RootstockStatus::Busy,
            "another thread is using this handle; lock around its calls".to_owned(),
        )),
    })
}

/// Runs a call; a panic becomes a status.
pub(crate) fn guard(call: impl FnOnce() -> Result<(), Failure>) -> RootstockStatus {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => finish(result),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(ToString::to_string);
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            finish(Err(Failure(
                RootstockStatus::Panicked,
                text.unwrap_or_else(|| "a panic without a message".to_owned()),
            )))
        }
    }
}

/// Frees a handle. `give_back` empties the value when no panic has spoilt it.
pub(crate) fn free<T>(_host: Host, handle: *mut Handle<T>, give_back: impl FnOnce(&mut T)) {
    if handle.is_null() {
        return;
    }
    // SAFETY: it came from `Handle::new`, and the host gives it up.
    let handle = unsafe { Box::from_raw(handle) };
    guard(|| {
        if let Ok(mut value) = handle.0.try_lock() {
            give_back(&mut value);
        }
        // A value that a panic left half changed may panic again when dropped: it is leaked.
        if handle.0.is_poisoned() {
            std::mem::forget(handle);
        }
        Ok(())
    });
}
