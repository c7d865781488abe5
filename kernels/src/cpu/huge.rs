//! Memory that is read from end to end all the time, on huge pages where the system has them.
//!
//! A decode step streams all weights and the KV of all its requests. On pages of 4 KiB that is a
//! page walk every 4 KiB, under a hypervisor a walk of two levels, and the processor's own
//! prefetching ends at each page. Matrices of small models are smaller than a huge page, so
//! weights are handed out from pieces that hold many of them.

use std::sync::{Mutex, PoisonError};

use bytes::BytesMut;

/// Bytes of a piece: many huge pages of 2 MiB, little beside a model.
const PIECE: usize = 32 << 20;

/// A cache line: how weights are aligned.
const LINE: usize = 64;

/// Hands out zeroed memory for weights, side by side in pieces of 32 MiB on huge pages.
///
/// A piece is freed with the last matrix in it.
#[derive(Debug, Default)]
pub struct WeightRoom {
    rest: Mutex<BytesMut>,
}

impl WeightRoom {
    /// `len` bytes that begin at a cache line; what is large beside a piece gets its own.
    pub(crate) fn take(&self, len: usize) -> BytesMut {
        let wanted = len + LINE;
        if wanted > PIECE / 2 {
            return part(&mut fresh(wanted), len);
        }
        let mut rest = self.rest.lock().unwrap_or_else(PoisonError::into_inner);
        if rest.len() < wanted {
            *rest = fresh(PIECE);
        }
        part(&mut rest, len)
    }
}

fn fresh(len: usize) -> BytesMut {
    let mut bytes = BytesMut::zeroed(len);
    advise_huge(&mut bytes);
    bytes
}

/// Splits `len` bytes off, from the next cache line on.
fn part(from: &mut BytesMut, len: usize) -> BytesMut {
    let skip = from.as_ptr().align_offset(LINE);
    drop(from.split_to(skip));
    from.split_to(len)
}

/// Asks the system for huge pages under `bytes`; where it has none, nothing changes.
///
/// Worth it for megabytes that are read all the time, before they are first written. Memory is
/// then taken 2 MiB at a time.
pub fn advise_huge(bytes: &mut [u8]) {
    #[cfg(target_os = "linux")]
    {
        let page = rustix::param::page_size();
        let skip = bytes.as_ptr().align_offset(page);
        let len = bytes.len().saturating_sub(skip) / page * page;
        if len > 0 {
            let start = bytes.as_mut_ptr().wrapping_add(skip).cast();
            let advice = rustix::mm::Advice::LinuxHugepage;
            // SAFETY: whole pages inside a slice that is ours alone; the advice changes no byte.
            let taken = unsafe { rustix::mm::madvise(start, len, advice) };
            // A system without huge pages refuses, and goes on with small ones.
            taken.unwrap_or_default();
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = bytes;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_zero_aligned_and_apart_whatever_their_sizes() {
        let room = WeightRoom::default();
        let sizes = [
            1,
            63,
            64,
            65,
            4096,
            PIECE - 1,
            2 * PIECE,
            7,
            PIECE / 2,
            PIECE / 2,
        ];
        let mut parts: Vec<BytesMut> = sizes.iter().map(|&len| room.take(len)).collect();
        for (index, (part, len)) in parts.iter_mut().zip(sizes).enumerate() {
            assert_eq!((part.len(), part.as_ptr().align_offset(LINE)), (len, 0));
            assert!(part.iter().all(|&byte| byte == 0));
            part.fill(index as u8 + 1);
        }
        for (index, part) in parts.iter().enumerate() {
            assert!(part.iter().all(|&byte| byte == index as u8 + 1), "{index}");
        }
    }
}
