//! Progress of a replay, told to the bar in batches so that counting costs nothing.

use indicatif::ProgressBar;

/// Requests between two words to the bar.
const BATCH: u64 = 1024;

/// Counts the requests of one replay.
#[derive(Debug)]
pub(crate) struct Ticker {
    bar: ProgressBar,
    untold: u64,
}

impl Ticker {
    /// Reports to `bar`.
    pub(crate) fn new(bar: ProgressBar) -> Self {
        Self { bar, untold: 0 }
    }

    /// Reports to nobody.
    #[cfg(test)]
    pub(crate) fn hidden() -> Self {
        Self::new(ProgressBar::hidden())
    }

    /// One request is done.
    pub(crate) fn tick(&mut self) {
        self.untold += 1;
        if self.untold == BATCH {
            self.bar.inc(self.untold);
            self.untold = 0;
        }
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.bar.inc(self.untold);
    }
}
