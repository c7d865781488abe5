//! What comes over the border: pointers to slices, texts, structures and places for results.
//!
//! Each exported function makes one [`Host`], and with it the one promise that its pointers are
//! as the header says; everything after that is checked as far as it can be.

use std::ffi::c_char;

use crate::status::{Failure, RootstockStatus};

/// The host's promise, for one call: a pointer that is not null points to as many initialised
/// values as its length says (for results: has room for them), and nobody else changes them
/// meanwhile; a handle that is not null is live.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host(());

impl Host {
    /// The promise.
    ///
    /// # Safety
    /// It holds for every pointer that is given to this value's methods until the call returns.
    pub(crate) const unsafe fn promises() -> Self {
        Self(())
    }

    /// `length` values at `pointer`; none when `length` is 0, whatever the pointer.
    pub(crate) fn slice<'a, T>(
        self,
        name: &str,
        pointer: *const T,
        length: usize,
    ) -> Result<&'a [T], Failure> {
        if length == 0 {
            return Ok(&[]);
        }
        if pointer.is_null() {
            return Err(Failure::invalid(format!(
                "{name} is null, its length {length}"
            )));
        }
        if !pointer.is_aligned() || length > isize::MAX as usize / size_of::<T>().max(1) {
            let text = format!("{name} is not aligned, or its length {length} cannot be");
            return Err(Failure::invalid(text));
        }
        // SAFETY: not null, aligned, of a possible length; the host promises the values.
        Ok(unsafe { std::slice::from_raw_parts(pointer, length) })
    }

    /// Room for `length` values at `pointer`; None when there is none.
    pub(crate) fn slice_out<'a, T>(self, pointer: *mut T, length: usize) -> Option<&'a mut [T]> {
        let possible = length <= isize::MAX as usize / size_of::<T>().max(1);
        if pointer.is_null() || length == 0 || !pointer.is_aligned() || !possible {
            return None;
        }
        // SAFETY: not null, aligned, of a possible length; the host promises the rest.
        Some(unsafe { std::slice::from_raw_parts_mut(pointer, length) })
    }

    /// Text of `length` bytes at `pointer`.
    pub(crate) fn text<'a>(
        self,
        name: &str,
        pointer: *const c_char,
        length: usize,
    ) -> Result<&'a str, Failure> {
        let bytes = self.slice(name, pointer.cast::<u8>(), length)?;
        std::str::from_utf8(bytes)
            .map_err(|error| Failure::invalid(format!("{name} is not UTF-8: {error}")))
    }

    /// Text that may be absent: null is none.
    pub(crate) fn optional_text(
        self,
        name: &str,
        pointer: *const c_char,
        length: usize,
    ) -> Result<Option<String>, Failure> {
        if pointer.is_null() {
            return Ok(None);
        }
        self.text(name, pointer, length)
            .map(|text| Some(text.to_owned()))
    }

    /// Writes a result; null is refused.
    pub(crate) fn write<T>(self, name: &str, pointer: *mut T, value: T) -> Result<(), Failure> {
        check_out(name, pointer)?;
        // SAFETY: not null and aligned; the host promises the room.
        unsafe { pointer.write(value) };
        Ok(())
    }

    /// A structure that begins with its size.
    pub(crate) fn sized<'a, T>(self, name: &str, pointer: *const T) -> Result<&'a T, Failure> {
        if pointer.is_null() || !pointer.is_aligned() {
            return Err(Failure::invalid(format!("{name} is null or not aligned")));
        }
        // SAFETY: not null, aligned for T, which begins with this number.
        let size = unsafe { pointer.cast::<u32>().read() } as usize;
        if size < size_of::<T>() {
            let wanted = size_of::<T>();
            return Err(Failure::invalid(format!(
                "{name}.struct_size is {size}; set it to sizeof, {wanted} bytes in this version"
            )));
        }
        // SAFETY: the structure is at least as large as ours.
        Ok(unsafe { &*pointer })
    }

    /// Copies `values` into a buffer of the caller's and says how many there are.
    pub(crate) fn copy_out<T: Copy>(
        self,
        values: &[T],
        buffer: *mut T,
        capacity: usize,
        length: *mut usize,
    ) -> Result<(), Failure> {
        self.write("length", length, values.len())?;
        if values.len() > capacity {
            return Err(Failure(
                RootstockStatus::TooSmall,
                format!(
                    "the buffer has room for {capacity}, {} are needed",
                    values.len()
                ),
            ));
        }
        match self.slice_out(buffer, capacity) {
            Some(out) => out[..values.len()].copy_from_slice(values),
            None if values.is_empty() => {}
            None => return Err(Failure::invalid("the buffer is null or not aligned")),
        }
        Ok(())
    }
}

/// Refuses a place for a result before anything changes.
pub(crate) fn check_out<T>(name: &str, pointer: *mut T) -> Result<(), Failure> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(Failure::invalid(format!("{name} is null or not aligned")));
    }
    Ok(())
}
