//! What a ticket's holder wants of a request under way, from any thread to the core thread.
//!
//! ```text
//! holder        mark the wish, count it, wake          (a full inbox wakes by itself)
//! core thread   woken: take the count; where there was one, look at the marks
//! ```
//!
//! The mark comes before the count and the count before the wake, so whoever is woken finds both,
//! and a wish that is counted while the marks are looked at is looked at in the next turn.
//! `tests/schedules` runs this file under schedules made up for it.

use super::sync::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

const FINISH: u8 = 1;
const ABORT: u8 = 2;

/// The mark of one request.
#[derive(Debug, Default)]
pub(super) struct Control {
    wish: AtomicU8,
    done: AtomicBool,
}

/// What may be wished; an abort beats the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Finish,
    Abort,
}

/// Wishes that the core thread has not looked at.
#[derive(Debug, Default)]
pub(super) struct Wishes(AtomicUsize);

impl Control {
    /// Marks and counts a wish; true: the core thread is to be woken.
    #[must_use]
    pub(super) fn want(&self, wish: Wish, counted: &Wishes) -> bool {
        let wish = match wish {
            Wish::Finish => FINISH,
            Wish::Abort => ABORT,
        };
        if self.done.load(Ordering::Acquire) || self.wish.fetch_max(wish, Ordering::AcqRel) >= wish
        {
            return false;
        }
        counted.count();
        true
    }

    pub(super) fn wish(&self) -> Option<Wish> {
        match self.wish.load(Ordering::Acquire) {
            FINISH => Some(Wish::Finish),
            ABORT => Some(Wish::Abort),
            _ => None,
        }
    }

    /// The request has ended: nothing is to be wished any more.
    pub(super) fn set_done(&self) {
        self.done.store(true, Ordering::Release);
    }
}

impl Wishes {
    /// A request went live that was marked before: its mark has to be looked at again.
    pub(super) fn count(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether there were any; from here on there are none.
    pub(super) fn take(&self) -> bool {
        self.0.swap(0, Ordering::AcqRel) > 0
    }
}
