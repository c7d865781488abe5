//! How long a pin lasts: the TTL forms in use (`N`, `Ns`, `Nm`, `Nh`) and their cap.
//!
//! Zero means no pin. Above the cap the TTL is clamped and says so; nothing overflows. Whatever
//! does not parse is an error value that names the text: the caller decides whether that is a note
//! (`nvext`) or a refusal (an API's own field).

use rootstock_radix::Ttl;

/// The TTL of a `cache_control` that names none, in seconds.
pub const TTL_DEFAULT_S: u64 = 300;

/// The longest TTL, in seconds; longer ones are clamped to it.
pub const TTL_CAP_S: u64 = 24 * 3600;

/// A text that is not a TTL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected N, Ns, Nm or Nh (such as 300, 90s, 5m, 1h)")]
pub struct TtlError;

/// Reads a TTL: a whole number of seconds, or of the unit that follows it (`s`, `m`, `h`).
///
/// # Errors
/// The text has another form: empty, signed, fractional, with spaces, or with another unit.
pub fn parse_ttl(text: &str) -> Result<Ttl, TtlError> {
    let (digits, unit_s) = match text.as_bytes().last() {
        Some(b's') => (&text[..text.len() - 1], 1),
        Some(b'm') => (&text[..text.len() - 1], 60),
        Some(b'h') => (&text[..text.len() - 1], 3600),
        _ => (text, 1),
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(TtlError);
    }
    // Only digits are left, so the one way to fail is a number beyond u64: the cap is below it.
    let count = digits.parse::<u64>().unwrap_or(u64::MAX);
    Ok(ttl_of_seconds(count.saturating_mul(unit_s)))
}

/// A TTL of so many seconds, clamped to the cap.
pub fn ttl_of_seconds(seconds: u64) -> Ttl {
    Ttl {
        seconds: seconds.min(TTL_CAP_S),
        clamped: seconds > TTL_CAP_S,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_in_use_is_read() {
        for (text, seconds) in [
            ("5m", 300),
            ("1h", 3600),
            ("90s", 90),
            ("30m", 1800),
            ("300", 300),
            ("3s", 3),
            ("0s", 0),
            ("0", 0),
            ("007m", 420),
            ("24h", TTL_CAP_S),
            ("86400", TTL_CAP_S),
        ] {
            assert_eq!(
                parse_ttl(text),
                Ok(Ttl {
                    seconds,
                    clamped: false
                }),
                "{text}"
            );
        }
    }

    #[test]
    fn above_the_cap_is_clamped_visibly_and_never_overflows() {
        for text in [
            "86401",
            "25h",
            "99999999999h",
            "18446744073709551616",
            "9999999999999999999m",
        ] {
            assert_eq!(
                parse_ttl(text),
                Ok(Ttl {
                    seconds: TTL_CAP_S,
                    clamped: true
                }),
                "{text}"
            );
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "", "1hr", "-5m", "5M", "m", "+5m", " 5m", "5m ", "1.5h", "1d", "5 m", "5mm",
        ] {
            assert_eq!(parse_ttl(text), Err(TtlError), "{text:?}");
        }
        // Arabic-Indic digits, and a multi-byte last character: not ASCII, no panic.
        for text in ["\u{665}m", "5\u{6d}\u{301}", "\u{1f600}"] {
            assert_eq!(parse_ttl(text), Err(TtlError), "{text:?}");
        }
    }
}
