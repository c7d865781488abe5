//! What is asked of a prefix cache, ours or another's, so that one driver runs them all. A request
//! is a match with a lock and the gathering of its page ids, room for what is missing, an insertion
//! at its end, and the unlock.

/// How much of a prompt's identity a cache looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// Tokens are compared.
    Exact,
    /// 64-bit hashes of pages are compared and collisions accepted; tokens are not kept.
    Hashed,
    /// The same, and it holds no pages: it has neither capacity, locks nor an order of eviction.
    Index,
}

/// A prefix cache.
pub(crate) trait Peer: Sized {
    /// Its name in records.
    const NAME: &'static str;
    /// What it compares.
    const KIND: Kind;
    /// A request between its match and its unlock.
    type Held;

    /// An empty one of `pages` pages.
    fn new(page_tokens: u32, pages: u32) -> Self;

    /// Matches, locks and appends the ids of the pages found.
    fn begin(&mut self, tokens: &[u32], pages: &mut Vec<u32>) -> Self::Held;

    /// Tokens found by the match.
    fn found(held: &Self::Held) -> u32;

    /// Takes `pages` more for the request, evicting where there are too few; false when even that
    /// gives too few.
    fn take(&mut self, held: &mut Self::Held, pages: u32) -> bool;

    /// Puts in what the request computed: `tokens` are all of its whole pages.
    fn insert(&mut self, held: &mut Self::Held, tokens: &[u32]);

    /// Unlocks.
    fn end(&mut self, held: Self::Held);

    /// How much of a prefix is there, without any change.
    fn probe(&self, tokens: &[u32]) -> u32;

    /// Frees `pages` pages more than the `free` that are; false where it cannot evict. Who asks has
    /// counted, as counting is not what is measured.
    fn evict(&mut self, free: u32, pages: u32) -> bool;

    /// Pages that are free.
    fn free(&self) -> u32;
}
