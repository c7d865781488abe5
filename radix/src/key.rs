//! What identifies KV: typed namespaces and tokens. Compared structurally, never by hash alone.

use serde::{Deserialize, Serialize};

/// Id of a token in the model's vocabulary.
pub type Token = u32;

/// Who a request belongs to, for quotas and ownership.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
pub struct TenantId(pub u32);

/// An agent program: a session or run whose requests follow each other.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
pub struct ProgramId(pub u64);

/// Everything besides the tokens that KV depends on. Two keys are the same namespace when all
/// fields are equal; a salt `"a"` and an adapter `"a"` are not. An empty salt or adapter is
/// another key than an absent one: edges that treat them alike normalize before they come here.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct NamespaceKey {
    /// Model and revision.
    pub model: String,
    /// How the numbers were computed: instruction set, weight repack, KV type.
    pub numerics: String,
    /// Adapter and revision.
    pub lora: Option<String>,
    /// Tenant salt.
    pub salt: Option<String>,
}

/// An interned [`NamespaceKey`]. Never given to another key, even when the namespace is dropped.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct NamespaceId(u64);

impl NamespaceId {
    pub(crate) const fn new(slot: u32, generation: u32) -> Self {
        Self((generation as u64) << 32 | slot as u64)
    }

    #[expect(clippy::cast_possible_truncation, reason = "the low half is the slot")]
    pub(crate) const fn slot(self) -> usize {
        self.0 as u32 as usize
    }

    pub(crate) const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The id that [`NamespaceId::get`] gave as a number. One that no namespace has is harmless: a
    /// lookup in it misses.
    pub const fn from_raw(id: u64) -> Self {
        Self(id)
    }

    /// The id as a number, for logs, fingerprints and borders to other languages.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// A prefix to look up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key<'a> {
    /// Namespace.
    pub ns: NamespaceId,
    /// Tokens from the first position on.
    pub tokens: &'a [Token],
}
