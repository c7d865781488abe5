//! How a call ended, and the text that tells why.

use std::cell::RefCell;
use std::ffi::c_char;

use crate::args::Host;

/// How a call ended.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RootstockStatus {
    /// Done.
    Ok = 0,
    /// An argument cannot be: null, out of range, not UTF-8, not JSON, of another version.
    Invalid = 1,
    /// No such lease, allocation, step or replica.
    Unknown = 2,
    /// A buffer is too small; the length needed is told, nothing has changed.
    TooSmall = 3,
    /// Not enough pages, and nothing was evicted for it.
    Short = 4,
    /// The queue is full; ask again later.
    Full = 5,
    /// It can never be done.
    Refused = 6,
    /// Another thread is using the handle.
    Busy = 7,
    /// A panic was caught, in this call or an earlier one: the handle can only be freed.
    Panicked = 8,
    /// A recount does not add up: a fault of Rootstock, or pages that a host gave away twice.
    Corrupt = 9,
}

/// A call that did not work: its status, and the text for `rootstock_last_error`.
pub(crate) struct Failure(pub(crate) RootstockStatus, pub(crate) String);

impl Failure {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self(RootstockStatus::Invalid, text.into())
    }

    pub(crate) fn unknown(what: &str, id: u64) -> Self {
        let text = format!("{what} {id} is not known: it has ended, or never was");
        Self(RootstockStatus::Unknown, text)
    }
}

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Ends a call: keeps the text of a failure, gives the status.
pub(crate) fn finish(result: Result<(), Failure>) -> RootstockStatus {
    match result {
        Ok(()) => RootstockStatus::Ok,
        Err(Failure(status, text)) => {
            LAST_ERROR.with_borrow_mut(|last| *last = text);
            status
        }
    }
}

/// Writes why the last call of this thread that failed did so, as text that ends with 0, cut to
/// `size` bytes. Gives the length of the whole text without that 0; `buffer` may be null to ask.
///
/// # Safety
/// `buffer` is null or has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_last_error(buffer: *mut c_char, size: usize) -> usize {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    LAST_ERROR.with_borrow(|text| {
        if let Some(out) = host.slice_out(buffer.cast::<u8>(), size)
            && let Some(room) = out.len().checked_sub(1)
        {
            let mut end = text.len().min(room);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            out[..end].copy_from_slice(&text.as_bytes()[..end]);
            out[end] = 0;
        }
        text.len()
    })
}
