//! The only place of this crate that reads a clock.

use std::time::Instant;

use rootstock::memory::Nanos;

/// Monotonic nanoseconds since the clock was made; copies agree.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    /// A clock that starts at 0 now.
    #[must_use]
    pub fn start() -> Self {
        Self { start: read() }
    }

    /// Nanoseconds since the start.
    #[must_use]
    pub fn now(&self) -> Nanos {
        u64::try_from(read().duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "time enters the engine here and nowhere else"
)]
fn read() -> Instant {
    Instant::now()
}
