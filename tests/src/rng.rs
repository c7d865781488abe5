//! A small seeded generator: the whole simulation hangs on one seed.

/// SplitMix64 (public domain algorithm by Sebastiano Vigna).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator; equal seeds give equal sequences.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in `0..n`; 0 when `n` is 0.
    pub fn below(&mut self, n: u32) -> u32 {
        let wide = u64::from(n) * (self.next_u64() >> 32);
        u32::try_from(wide >> 32).unwrap_or(0)
    }

    /// A number in `from..=to`.
    pub fn between(&mut self, from: u32, to: u32) -> u32 {
        from + self.below(to - from + 1)
    }

    /// True with a probability of `percent` in a hundred.
    pub fn percent(&mut self, percent: u32) -> bool {
        self.below(100) < percent
    }

    /// One of a list.
    ///
    /// # Panics
    /// When the list is empty.
    pub fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        let n = u32::try_from(list.len()).unwrap_or(u32::MAX);
        &list[self.below(n) as usize]
    }
}

/// Finalizer of SplitMix64: a bijection that looks random.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
