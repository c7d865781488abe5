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

/// Seconds since 1970, with their fraction.
pub(crate) fn unix_seconds_exact() -> f64 {
    unix_nanos() as f64 / 1e9
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

/// A time as `2026-11-29T22:34:24Z`.
pub(crate) fn rfc3339(unix_s: u64) -> String {
    let (days, second) = (unix_s / 86_400, unix_s % 86_400);
    // Howard Hinnant's calendar: years that begin in March, eras of 400 years.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    let year = era * 400 + year + carry;
    let (hour, minute) = (second / 3_600, second / 60 % 60);
    format!(
        "{year:04}-{month:02}-{day_of_month:02}T{hour:02}:{minute:02}:{:02}Z",
        second % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_of_the_calendar() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_796_082_864), "2026-11-30T23:54:24Z");
        assert_eq!(rfc3339(4_107_542_399), "2100-02-28T23:59:59Z");
    }
}
