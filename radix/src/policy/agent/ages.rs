//! Time in bins: how far a moment lies behind an origin, or before it, in half octaves.
//!
//! The origin is the last use of something, or the moment at which it is expected to be used
//! again. Bins 32 to 63 lie behind the origin: the first takes what is nearer than 0.27 s, each
//! next one ends half an octave later, the last begins after 2.4 hours. Bins 0 to 31 mirror them
//! before the origin. Whole numbers only, so that all machines agree.

use rootstock_memory::Nanos;

/// Number of bins.
pub(crate) const BINS: usize = 64;

/// The first bin behind the origin.
pub(crate) const ORIGIN: usize = 32;

/// Half octaves that a distance is away from zero, at most 31.
const fn steps(distance: Nanos) -> usize {
    let units = distance >> 27;
    if units < 2 {
        return 0;
    }
    let octave = units.ilog2();
    let half = (units >> (octave - 1)) & 1;
    let steps = 2 * (octave as usize - 1) + half as usize + 1;
    if steps < ORIGIN { steps } else { ORIGIN - 1 }
}

/// The least distance of `step` half octaves.
const fn edge(step: usize) -> Nanos {
    match step {
        0 => 0,
        _ => (2 + (step as u64 - 1) % 2) << (27 + (step - 1) / 2),
    }
}

/// The bin of the moment `now`.
pub(crate) const fn bin(now: Nanos, origin: Nanos) -> usize {
    if now >= origin {
        ORIGIN + steps(now - origin)
    } else {
        ORIGIN - 1 - steps(origin - now)
    }
}

/// The first moment after `bin`.
#[cfg(test)]
const fn end(bin: usize, origin: Nanos) -> Nanos {
    if bin + 1 >= BINS {
        Nanos::MAX
    } else if bin >= ORIGIN {
        origin.saturating_add(edge(bin - ORIGIN + 1))
    } else {
        let distance = edge(ORIGIN - 1 - bin);
        let past = if distance == 0 { 0 } else { 1 };
        origin.saturating_sub(distance).saturating_add(past)
    }
}

/// The latest origin that has left `bin` by `now`; `None` while none can have.
pub(crate) const fn past(bin: usize, now: Nanos) -> Option<Nanos> {
    if bin + 1 >= BINS {
        None
    } else if bin >= ORIGIN {
        now.checked_sub(edge(bin - ORIGIN + 1))
    } else {
        let distance = edge(ORIGIN - 1 - bin);
        let past = if distance == 0 { 0 } else { 1 };
        now.saturating_add(distance).checked_sub(past)
    }
}

/// How long a bin lasts.
pub(crate) const fn width(bin: usize) -> Nanos {
    let step = if bin >= ORIGIN {
        bin - ORIGIN
    } else {
        ORIGIN - 1 - bin
    };
    if step + 1 < ORIGIN {
        edge(step + 1) - edge(step)
    } else {
        edge(step) / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bin_ends_where_the_next_begins() {
        let origin = 1 << 50;
        for bin_at in 0..BINS - 1 {
            let end = end(bin_at, origin);
            assert_eq!(bin(end - 1, origin), bin_at, "last moment of {bin_at}");
            assert_eq!(bin(end, origin), bin_at + 1, "first moment after {bin_at}");
        }
        for bin_at in 0..BINS - 1 {
            let end = end(bin_at, origin);
            assert!(past(bin_at, end).is_some_and(|limit| origin <= limit));
            assert!(past(bin_at, end - 1).is_none_or(|limit| origin > limit));
        }
        assert_eq!(bin(u64::MAX, 0), BINS - 1);
        assert_eq!(bin(0, u64::MAX), 0);
    }

    #[test]
    fn bins_grow_by_half_octaves_up_to_hours() {
        let widths: Vec<u64> = (ORIGIN..BINS - 1).map(width).collect();
        assert!(widths[1..].is_sorted());
        let last_s = end(BINS - 2, 0) / 1_000_000_000;
        assert!((8_700..8_800).contains(&last_s), "{last_s} s");
        assert!((0..ORIGIN).all(|bin| width(bin) == width(BINS - 1 - bin)));
    }
}
