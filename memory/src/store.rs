//! The storage tier as data: where a page lies there, what is to be read and written, and what
//! came of it. Pages are addressed by their content, so a store outlives the process and may be
//! shared.
//!
//! ```text
//! seed       = BLAKE3-128(parts of the namespace, each with its length)
//! address[0] = BLAKE3-128(seed || tokens of page 0 as little-endian u32)
//! address[i] = BLAKE3-128(address[i-1] || tokens of page i)
//! ```
//! An address finds a page and proves nothing: what is read is compared with the plan.

use crate::{CopyId, PageId};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Address of a page by its content, or the seed that a chain of them starts from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PageAddress(pub [u8; 16]);

impl PageAddress {
    /// The seed of a namespace that is made of `parts`. Absent and empty parts differ.
    pub fn seed(parts: &[Option<&str>]) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            let framed = part.map_or(u64::MAX, |part| part.len() as u64);
            hasher.update(&framed.to_le_bytes());
            hasher.update(part.unwrap_or_default().as_bytes());
        }
        Self::of(&hasher.finalize())
    }

    /// The address of the page of `tokens` that follows the one at `self`.
    ///
    /// # Cost
    /// One or two compressions a page of 16 tokens.
    #[must_use]
    pub fn next(self, tokens: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0);
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        Self::of(&hasher.finalize())
    }

    /// The hash of any bytes.
    pub fn digest(bytes: &[u8]) -> Self {
        Self::of(&blake3::hash(bytes))
    }

    /// Reads 32 hexadecimal digits in lower case.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        if digits.len() != 32 {
            return None;
        }
        let value = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        };
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = value(pair[0])? << 4 | value(pair[1])?;
        }
        Some(Self(bytes))
    }

    fn of(hash: &blake3::Hash) -> Self {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hash.as_bytes()[..16]);
        Self(bytes)
    }
}

impl fmt::Display for PageAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PageAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What to do with the pages of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum StoreOp {
    /// From host to storage.
    Write,
    /// From storage to host. Pages follow each other; after the first that is missing none counts.
    Read,
    /// Remove all that is stored.
    Clear,
    /// Look which pages are there; their host pages mean nothing. As with reading, none counts
    /// after the first that is missing.
    Look,
}

/// One page of a plan.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StorePage {
    /// Where its bytes are, or go to, on host.
    pub host: PageId,
    /// Where it lies in storage.
    pub address: PageAddress,
    /// Address of the page before it; the seed for the first one.
    pub parent: PageAddress,
    /// Its tokens.
    pub tokens: Box<[u32]>,
}

/// Reading, writing or clearing. Who plans it keeps the host pages of a write unchanged and those
/// of a read unused until it is acknowledged.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StorePlan {
    /// Unique in one cache; the acknowledgement names it.
    pub id: CopyId,
    /// What to do.
    pub op: StoreOp,
    /// Seed of the namespace of the pages.
    pub namespace: PageAddress,
    /// With which pages, in prefix order.
    pub pages: Box<[StorePage]>,
}

/// What a store tells.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum StoreEvent {
    /// A plan was carried out.
    Done {
        /// Which.
        id: CopyId,
        /// For each of its pages, whether it was stored, has arrived or is there.
        pages: Vec<bool>,
    },
    /// Pages are there: found at the start, or written by somebody else.
    Learned(Vec<PageAddress>),
    /// Pages are there no more.
    Lost(Vec<PageAddress>),
}

/// The address of a store as it may be shown: without name, password and options.
pub fn without_secrets(uri: &str) -> String {
    let plain = uri.split('?').next().unwrap_or_default();
    let Some((scheme, rest)) = plain.split_once("://") else {
        return plain.to_owned();
    };
    let (place, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let place = place.rsplit_once('@').map_or(place, |(_, place)| place);
    format!("{scheme}://{place}{path}")
}

/// What a store did: counters, and two gauges, `pages` and `bytes`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StoreStats {
    /// Pages written.
    pub written: u64,
    /// Pages read that were right.
    pub read: u64,
    /// Pages asked for that are not there.
    pub missing: u64,
    /// Pages with a checksum that does not hold.
    pub corrupt: u64,
    /// Pages that are too short or too long.
    pub truncated: u64,
    /// Whole pages of another layout, numerics, namespace, or of other tokens.
    pub foreign: u64,
    /// Reads and writes that the store refused.
    pub errors: u64,
    /// Reads, looks and writes that took too long.
    pub timeouts: u64,
    /// Pages evicted for the quota.
    pub evicted: u64,
    /// Pages in the store.
    pub pages: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Carries out plans for a store in the background: writes in the order of their submission,
/// reads and looks before them, nothing across a clear.
pub trait StoreEngine: Send {
    /// Queues a plan. Does not wait.
    ///
    /// # Errors
    /// Gives the plan back when it cannot be taken: it is not done then.
    fn submit(&mut self, plan: StorePlan) -> Result<(), StorePlan>;

    /// Appends what the store told since the last call: one answer to each plan that was taken,
    /// late or failed if it must be. Does not wait.
    fn poll(&mut self, events: &mut Vec<StoreEvent>);

    /// What it did so far.
    fn stats(&self) -> StoreStats;

    /// Ends it; returns what it had still to tell: an answer to each plan that was taken. Waits
    /// for the one that is under way.
    fn close(self: Box<Self>) -> Vec<StoreEvent>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_depend_on_every_part_and_on_all_that_comes_before() {
        let seeds = [
            PageAddress::seed(&[Some("m"), None]),
            PageAddress::seed(&[Some("m"), Some("")]),
            PageAddress::seed(&[None, Some("m")]),
            PageAddress::seed(&[Some("mm"), None]),
        ];
        let mut all: Vec<PageAddress> = seeds.into();
        for seed in seeds {
            all.push(seed.next(&[1, 2]));
            all.push(seed.next(&[2, 1]));
            all.push(seed.next(&[1]).next(&[2]));
        }
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn an_address_is_shown_without_what_opens_the_store() {
        for (uri, shown) in [
            ("fs:///var/kv@home", "fs:///var/kv@home"),
            ("redis://u:pa@ss@host:6379/2", "redis://host:6379/2"),
            ("s3://bucket/a?secret_access_key=x", "s3://bucket/a"),
            ("nonsense", "nonsense"),
        ] {
            assert_eq!(without_secrets(uri), shown);
        }
    }

    #[test]
    fn the_text_of_an_address_reads_back_and_other_texts_do_not() {
        let address = PageAddress::digest(b"page");
        assert_eq!(PageAddress::parse(&address.to_string()), Some(address));
        for text in [
            "",
            "00",
            "zz",
            &"0".repeat(33),
            &"G".repeat(32),
            &"\u{e9}".repeat(16),
        ] {
            assert_eq!(PageAddress::parse(text), None, "{text}");
        }
    }
}
