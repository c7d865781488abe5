//! A hash over words that is the same on every machine, for what a collision would only misplace:
//! groups of those who wait, and fingerprints of plans. Not against adversaries.

/// FNV-1a over 64-bit words, each followed by an avalanche.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WordHash(u64);

impl WordHash {
    /// Of nothing yet.
    pub(crate) const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    /// Takes in one word.
    pub(crate) const fn word(&mut self, word: u64) {
        let mut x = (self.0 ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        x ^= x >> 32;
        self.0 = x.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    /// The hash of all words so far.
    pub(crate) const fn get(self) -> u64 {
        self.0
    }
}
