//! What an operator is told of when it happens, since nothing else would show it: a journal that
//! ended, a store that refuses.

use rootstock::journal::{JournalState, JournalStats};
use rootstock::memory::{Nanos, StoreStats};

/// Between two lines about a store that keeps failing.
const STORE_EVERY_NS: Nanos = 60_000_000_000;

/// What was told already.
#[derive(Debug, Default)]
pub(super) struct Watch {
    journal_ended: bool,
    store_failures: u64,
    /// When the store was told of last.
    store_told: Option<Nanos>,
}

impl Watch {
    /// A line about a journal that records no longer; once.
    pub(super) fn journal(&mut self, journal: Option<&JournalStats>) -> Option<String> {
        let journal = journal.filter(|_| !self.journal_ended)?;
        let why = match journal.state {
            JournalState::Recording | JournalState::Closed => return None,
            JournalState::Full => "it has reached its limit".to_owned(),
            JournalState::Failed(kind) => format!("it cannot be written: {kind}"),
        };
        self.journal_ended = true;
        let bytes = journal.bytes;
        Some(format!(
            "the journal ends here, at {bytes} bytes: {why}; requests go on, start anew to record"
        ))
    }

    /// A line about reads and writes that failed since the last one; at most once a minute.
    pub(super) fn store(&mut self, store: Option<&StoreStats>, now: Nanos) -> Option<String> {
        let failures = store.map_or(0, |store| store.errors + store.timeouts);
        // A store that was attached anew counts from 0.
        let new = failures
            .checked_sub(self.store_failures)
            .unwrap_or(failures);
        let soon = |told: Nanos| now.saturating_sub(told) < STORE_EVERY_NS;
        if new == 0 || self.store_told.is_some_and(soon) {
            return None;
        }
        self.store_failures = failures;
        self.store_told = Some(now);
        Some(format!(
            "the storage tier refused or did not answer {new} reads and writes; what it lacks is \
computed. Is it full, read-only or gone?"
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    fn journal(state: JournalState) -> JournalStats {
        JournalStats {
            bytes: 20_480,
            entries: 3,
            dropped: 0,
            state,
        }
    }

    #[test]
    fn a_journal_that_ends_is_told_once_and_one_that_records_never() {
        let mut watch = Watch::default();
        assert_eq!(watch.journal(None), None);
        for quiet in [JournalState::Recording, JournalState::Closed] {
            assert_eq!(watch.journal(Some(&journal(quiet))), None);
        }
        let full = journal(JournalState::Failed(ErrorKind::StorageFull));
        let line = watch.journal(Some(&full)).unwrap();
        assert!(line.contains("20480 bytes"), "{line}");
        assert!(line.contains(&ErrorKind::StorageFull.to_string()), "{line}");
        assert_eq!(watch.journal(Some(&full)), None);
        let line = Watch::default().journal(Some(&journal(JournalState::Full)));
        assert!(line.unwrap().contains("limit"));
    }

    #[test]
    fn a_store_that_fails_is_told_at_once_and_then_once_a_minute_with_what_is_new() {
        let mut watch = Watch::default();
        let failed = |errors, timeouts| StoreStats {
            errors,
            timeouts,
            ..StoreStats::default()
        };
        let mut tell = |stats: StoreStats, second: u64| {
            let line = watch.store(Some(&stats), second * 1_000_000_000)?;
            let number = line.split(' ').find_map(|word| word.parse::<u64>().ok());
            Some(number.unwrap())
        };
        assert_eq!(tell(failed(0, 0), 1), None);
        assert_eq!(tell(failed(1, 1), 2), Some(2));
        assert_eq!(tell(failed(9, 1), 61), None, "less than a minute");
        assert_eq!(tell(failed(9, 1), 62), Some(8));
        assert_eq!(tell(failed(9, 1), 500), None, "nothing new");
        assert_eq!(tell(failed(3, 0), 600), Some(3), "another store");
        assert_eq!(watch.store(None, u64::MAX), None);
    }
}
