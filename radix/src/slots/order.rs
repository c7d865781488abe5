//! The candidates of one tier, in order. Of policy `agent` the order is the shelf of learned worth
//! that the page cache has as well; of the others it is a set of keys.

use super::cell::Rank;
use crate::policy::agent::{Mark, Shelf};
use std::collections::BTreeSet;

/// Bits of a rank below what was said about retention.
pub(super) const CLASS_BITS: u32 = 32;

/// Who can go, and who goes first.
#[derive(Debug)]
pub(super) enum Candidates {
    /// Lowest key first.
    Ranked(BTreeSet<(Rank, u32)>),
    /// By retention and learned worth.
    Worth(Box<Shelf>),
}

impl Candidates {
    pub(super) fn insert(&mut self, rank: Rank, at: u32) {
        match self {
            Self::Ranked(set) => {
                set.insert((rank, at));
            }
            Self::Worth(shelf) => {
                let level = i32::try_from(rank.0 >> CLASS_BITS).unwrap_or(i32::MAX);
                let stamp = u64::try_from(rank.1).unwrap_or(0);
                shelf.insert(at, level, stamp);
            }
        }
    }

    pub(super) fn remove(&mut self, rank: Rank, at: u32) {
        match self {
            Self::Ranked(set) => {
                set.remove(&(rank, at));
            }
            Self::Worth(shelf) => shelf.remove(at),
        }
    }

    pub(super) fn first(&mut self) -> Option<u32> {
        match self {
            Self::Ranked(set) => set.first().map(|&(_, at)| at),
            Self::Worth(shelf) => shelf.first(),
        }
    }

    pub(super) fn shelf(&mut self) -> Option<&mut Shelf> {
        match self {
            Self::Ranked(_) => None,
            Self::Worth(shelf) => Some(shelf),
        }
    }

    pub(super) fn mark_of(&self, at: u32) -> Mark {
        match self {
            Self::Ranked(_) => Mark::NONE,
            Self::Worth(shelf) => shelf.mark_of(at),
        }
    }

    /// What is wrong, given who belongs here.
    pub(super) fn fault(&self, expected: &BTreeSet<(Rank, u32)>) -> Option<String> {
        match self {
            Self::Ranked(set) => {
                (set != expected).then(|| "the orders hold other nodes".to_owned())
            }
            Self::Worth(shelf) => match shelf.check() {
                Err(fault) => Some(fault),
                Ok(count) => {
                    let missing = expected.iter().find(|&&(_, at)| !shelf.holds(at));
                    let missing = missing.map(|(_, at)| format!("node {at} is not on the shelf"));
                    let wrong = count != expected.len();
                    missing.or_else(|| wrong.then(|| format!("{count} nodes are on the shelf")))
                }
            },
        }
    }
}
