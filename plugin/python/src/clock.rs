//! The only place of the module that reads a clock.

use std::sync::OnceLock;
use std::time::Instant;

/// Nanoseconds since the first call in this process.
pub(crate) fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    #[expect(
        clippy::disallowed_methods,
        reason = "a host in Python may leave the time to us, here only"
    )]
    let now = Instant::now();
    let start = START.get_or_init(|| now);
    u64::try_from(now.duration_since(*start).as_nanos()).unwrap_or(u64::MAX)
}
