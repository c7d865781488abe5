//! What changed in the cache, as data: pages stored and removed per tier, tiers cleared.

use crate::{NamespaceId, Token};
use rootstock_memory::ReplicaId;
use serde::{Deserialize, Serialize};

/// The tier an event is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum EventTier {
    /// Device memory of a replica.
    Device(ReplicaId),
    /// Host memory.
    Host,
}

/// A page that became matchable.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StoredPage {
    /// Chained hash of all tokens up to and with this page.
    pub sequence_hash: u64,
    /// Hash of the tokens of this page alone.
    pub local_hash: u64,
    /// The tokens of this page.
    pub tokens: Box<[Token]>,
}

/// One change. Splits and reads are none.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum KvEvent {
    /// Pages became matchable in a tier, in prefix order.
    Stored {
        /// Where.
        tier: EventTier,
        /// Whose.
        ns: NamespaceId,
        /// Sequence hash of the page before the first one; `None` at the root.
        parent: Option<u64>,
        /// The pages.
        pages: Vec<StoredPage>,
    },
    /// Pages went from a tier, deepest first.
    Removed {
        /// Where.
        tier: EventTier,
        /// Their sequence hashes.
        hashes: Vec<u64>,
    },
    /// A tier was emptied.
    Cleared {
        /// Which.
        tier: EventTier,
    },
}
