//! The last messages, numbered, within a number of bytes.
//!
//! ```text
//!   push -> [ first | ... | next-1 ]        readers keep nothing but the number they read next
//!             ^ overwritten when the bytes run out
//! ```
//! Writers never wait for readers; any number of readers, each at its own pace. A reader that was
//! overtaken goes on with the oldest message kept, and sees from its number what it missed. So
//! memory is bounded by the ring and one full account, however many read and however slowly.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

use tokio::sync::watch;

use super::sync::{Mutex, MutexGuard};

/// What a message costs beside its bytes.
const OVERHEAD_BYTES: usize = 64;

/// Numbered messages.
#[derive(Debug)]
pub struct Ring {
    inner: Mutex<Inner>,
    next: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    /// Number of the oldest message kept.
    first: u64,
    messages: VecDeque<Arc<[u8]>>,
    bytes: usize,
    limit_bytes: usize,
    /// From this message on, everything is told from the start.
    whole_from: u64,
    /// Bytes of that account.
    whole_bytes: usize,
}

/// State of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingState {
    /// Number of the oldest message kept.
    pub first: u64,
    /// Number that the next message gets.
    pub next: u64,
    /// Bytes kept.
    pub bytes: usize,
}

impl Ring {
    /// An empty ring. The newest message is kept in any case, even over the limit.
    pub fn new(first: u64, limit_bytes: usize) -> Ring {
        Ring {
            inner: Mutex::new(Inner {
                first,
                messages: VecDeque::new(),
                bytes: 0,
                limit_bytes,
                whole_from: first,
                whole_bytes: 0,
            }),
            next: watch::Sender::new(first),
        }
    }

    /// Appends a message.
    ///
    /// # Cost
    /// A short lock; it waits for no reader.
    pub fn push(&self, message: Vec<u8>) {
        self.append(&mut self.inner(), std::iter::once(message));
    }

    /// Appends messages that tell everything from the start: a reader from here on needs none
    /// before them. They come on top of the limit, or readers could never get all of them.
    pub fn push_whole(&self, messages: Vec<Vec<u8>>) {
        let bytes = |message: &Vec<u8>| message.len() + OVERHEAD_BYTES;
        let mut inner = self.inner();
        inner.whole_from = inner.next();
        inner.whole_bytes = messages.iter().map(bytes).sum();
        // Under the same lock: a message in between would count as the first of the account.
        self.append(&mut inner, messages);
    }

    fn append(&self, inner: &mut Inner, messages: impl IntoIterator<Item = Vec<u8>>) {
        for message in messages {
            inner.bytes += message.len() + OVERHEAD_BYTES;
            inner.messages.push_back(message.into());
        }
        while inner.bytes > inner.limit_bytes + inner.whole_bytes && inner.messages.len() > 1 {
            if let Some(oldest) = inner.messages.pop_front() {
                inner.bytes -= oldest.len() + OVERHEAD_BYTES;
                inner.first += 1;
            }
        }
        self.next.send_replace(inner.next());
    }

    /// Message `from`, or the oldest one kept after it; `None` when there is none yet.
    pub fn read(&self, from: u64) -> Option<(u64, Arc<[u8]>)> {
        let inner = self.inner();
        let number = from.max(inner.first);
        let at = usize::try_from(number - inner.first).ok()?;
        inner
            .messages
            .get(at)
            .map(|message| (number, Arc::clone(message)))
    }

    /// Whether who reads from `from` on, having heard all before it, gets to know everything.
    pub fn tells_all_from(&self, from: u64) -> bool {
        let inner = self.inner();
        from >= inner.first || inner.whole_from >= inner.first
    }

    /// Where it stands.
    pub fn state(&self) -> RingState {
        let inner = self.inner();
        RingState {
            first: inner.first,
            next: inner.next(),
            bytes: inner.bytes,
        }
    }

    /// Changes with each message: its value is the number of the next one.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.next.subscribe()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn next(&self) -> u64 {
        self.first + self.messages.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_first_and_readers_see_from_the_number_what_they_missed() {
        let ring = Ring::new(10, 3 * (1 + OVERHEAD_BYTES));
        for byte in 0..5 {
            ring.push(vec![byte]);
        }
        assert_eq!(ring.state().first, 12);
        assert_eq!(ring.state().bytes, 3 * (1 + OVERHEAD_BYTES));
        let (number, message) = ring.read(0).unwrap();
        assert_eq!((number, &*message), (12, &[2][..]));
        assert_eq!(ring.read(14).unwrap().0, 14);
        assert!(ring.read(15).is_none());
        assert!(!ring.tells_all_from(11) && ring.tells_all_from(12));
    }

    #[test]
    fn whoever_starts_at_a_full_account_needs_nothing_before_it() {
        let ring = Ring::new(0, 2 * (1 + OVERHEAD_BYTES));
        ring.push(vec![0]);
        assert!(ring.tells_all_from(0), "nothing was overwritten");
        ring.push(vec![1]);
        ring.push(vec![2]);
        assert!(!ring.tells_all_from(0));
        ring.push_whole(vec![vec![3], vec![4], vec![5]]);
        assert_eq!(ring.read(3).unwrap().0, 3, "an account is kept whole");
        assert!(ring.tells_all_from(0));
        ring.push(vec![6]);
        ring.push(vec![7]);
        assert!(ring.tells_all_from(0));
        ring.push(vec![8]);
        assert!(!ring.tells_all_from(0), "the account itself is gone");
    }

    #[test]
    fn a_message_over_the_limit_is_kept_until_the_next() {
        let ring = Ring::new(0, 10);
        ring.push(vec![0; 100]);
        assert_eq!(ring.read(0).unwrap().1.len(), 100);
        ring.push(vec![1]);
        assert_eq!(ring.read(0).unwrap().0, 1);
    }
}
