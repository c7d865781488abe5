//! How many requests a tenant may begin in a minute: a bucket that fills evenly and holds a
//! minute's worth, so that an agent's bursts pass and a loop does not.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// The rate of one tenant.
#[derive(Debug)]
pub struct Rate {
    per_minute: u32,
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    requests: f64,
    at: Option<Instant>,
}

impl Rate {
    /// A full bucket of `per_minute` requests.
    pub fn new(per_minute: u32) -> Rate {
        let bucket = Bucket {
            requests: f64::from(per_minute),
            at: None,
        };
        Rate {
            per_minute,
            bucket: Mutex::new(bucket),
        }
    }

    /// Takes one request out of the bucket.
    ///
    /// # Errors
    /// The whole seconds after which there is one, at least 1.
    pub fn take(&self, now: Instant) -> Result<(), u32> {
        let most = f64::from(self.per_minute);
        let per_second = most / 60.0;
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = bucket.at {
            let passed_s = now.saturating_duration_since(at).as_secs_f64();
            bucket.requests = most.min(bucket.requests + passed_s * per_second);
        }
        bucket.at = Some(now);
        if bucket.requests >= 1.0 {
            bucket.requests -= 1.0;
            return Ok(());
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0 to 60 seconds"
        )]
        let wait_s = ((1.0 - bucket.requests) / per_second).ceil() as u32;
        Err(wait_s.clamp(1, 60))
    }

    /// The limit, in requests a minute.
    pub fn per_minute(&self) -> u32 {
        self.per_minute
    }
}

impl PartialEq for Rate {
    fn eq(&self, other: &Rate) -> bool {
        self.per_minute == other.per_minute
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_burst_passes_then_one_at_a_time_and_the_wait_is_enough() {
        let rate = Rate::new(6);
        let start = crate::clock::now();
        assert!((0..6).all(|_| rate.take(start).is_ok()));
        let wait_s = rate.take(start).unwrap_err();
        assert_eq!(wait_s, 10, "6 a minute are one in 10 s");
        let early = start + Duration::from_secs(u64::from(wait_s) - 1);
        assert_eq!(rate.take(early), Err(1));
        let after = start + Duration::from_secs(wait_s.into());
        assert_eq!(rate.take(after), Ok(()));
        assert!(rate.take(after).is_err(), "only one has come in");
        let much_later = start + Duration::from_secs(10_000);
        assert!((0..6).all(|_| rate.take(much_later).is_ok()));
        assert!(
            rate.take(much_later).is_err(),
            "the bucket holds a minute's worth"
        );
    }
}
