//! The only place of the server that reads a clock.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Seconds since 1970, as the `created` field of OpenAI's answers wants them. Zero when the
/// machine's clock stands before 1970.
pub(crate) fn unix_seconds() -> u64 {
    unix_nanos() / 1_000_000_000
}

/// Milliseconds since 1970.
pub(crate) fn unix_millis() -> u64 {
    unix_nanos() / 1_000_000
}

/// Nanoseconds since 1970; saturates in the year 2554.
pub(crate) fn unix_nanos() -> u64 {
    #[expect(
        clippy::disallowed_methods,
        reason = "the server may read the clock, here only"
    )]
    let now = SystemTime::now();
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The monotonic clock.
pub(crate) fn now() -> Instant {
    #[expect(
        clippy::disallowed_methods,
        reason = "the server may read the clock, here only"
    )]
    Instant::now()
}
