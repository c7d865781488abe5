//! An output buffer that the tasks of one run write in disjoint parts.

use std::marker::PhantomData;
use std::ops::Range;

/// A `&mut [T]` that several threads may split among themselves.
pub(crate) struct SharedOut<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]`; `part` asks its callers for disjoint ranges.
unsafe impl<T: Send> Sync for SharedOut<'_, T> {}

impl<'a, T> SharedOut<'a, T> {
    pub(crate) fn new(out: &'a mut [T]) -> Self {
        Self {
            start: out.as_mut_ptr(),
            len: out.len(),
            borrow: PhantomData,
        }
    }

    /// A part of the buffer.
    ///
    /// # Panics
    /// On a range outside the buffer.
    ///
    /// # Safety
    /// While the part is in use, no other part that overlaps it is.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's duty")]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end, "range ends before it starts");
        assert!(range.end <= self.len, "range ends outside the buffer");
        // SAFETY: the range starts inside the borrowed buffer or at its end.
        let start = unsafe { self.start.add(range.start) };
        // SAFETY: the range is inside the buffer, which is borrowed for the lifetime of `self`,
        // and the caller uses no overlapping part.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }
}
