//! Python's `random.Random`, as far as the workloads need it, so that both languages make the same
//! inputs from the same seed: MT19937 with Python's seeding, and its ways to draw from it.
//! Source: Matsumoto and Nishimura 1998; CPython's `random` module for the draws.

const WORDS: usize = 624;
const SHIFT: usize = 397;

/// A generator whose draws equal Python's.
#[derive(Clone, Debug)]
pub struct PythonRandom {
    state: [u32; WORDS],
    index: usize,
}

impl PythonRandom {
    /// As `random.Random(seed)`.
    pub fn new(seed: u32) -> Self {
        let mut state = [0_u32; WORDS];
        let mut word = 19_650_218_u32;
        for (place, at) in state.iter_mut().zip(1_u32..) {
            *place = word;
            word = (word ^ word >> 30)
                .wrapping_mul(1_812_433_253)
                .wrapping_add(at);
        }
        // The key has one word, so the rounds over it only add the seed.
        let mut at = 1;
        for _ in 0..WORDS {
            let before = state[at - 1];
            let mixed = (before ^ before >> 30).wrapping_mul(1_664_525);
            state[at] = (state[at] ^ mixed).wrapping_add(seed);
            at = Self::after(at, &mut state);
        }
        for _ in 1..WORDS {
            let before = state[at - 1];
            let mixed = (before ^ before >> 30).wrapping_mul(1_566_083_941);
            #[expect(clippy::cast_possible_truncation, reason = "below 624")]
            let number = at as u32;
            state[at] = (state[at] ^ mixed).wrapping_sub(number);
            at = Self::after(at, &mut state);
        }
        state[0] = 0x8000_0000;
        Self {
            state,
            index: WORDS,
        }
    }

    /// The index after `at`; round the end, the last word becomes the first.
    fn after(at: usize, state: &mut [u32; WORDS]) -> usize {
        if at + 1 < WORDS {
            return at + 1;
        }
        state[0] = state[WORDS - 1];
        1
    }

    fn next_u32(&mut self) -> u32 {
        if self.index == WORDS {
            for at in 0..WORDS {
                let high = self.state[at] & 0x8000_0000;
                let bits = high | self.state[(at + 1) % WORDS] & 0x7fff_ffff;
                let twist = if bits & 1 == 1 { 0x9908_b0df } else { 0 };
                self.state[at] = self.state[(at + SHIFT) % WORDS] ^ bits >> 1 ^ twist;
            }
            self.index = 0;
        }
        let mut word = self.state[self.index];
        self.index += 1;
        word ^= word >> 11;
        word ^= word << 7 & 0x9d2c_5680;
        word ^= word << 15 & 0xefc6_0000;
        word ^ word >> 18
    }

    /// As `random()`: from 0 to below 1 in steps of 2^-53.
    pub fn random(&mut self) -> f64 {
        let (high, low) = (self.next_u32() >> 5, self.next_u32() >> 6);
        (f64::from(high) * 67_108_864.0 + f64::from(low)) / 9_007_199_254_740_992.0
    }

    /// As `uniform(low, high)`.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.random()
    }

    /// As `randint(low, high)`, both included.
    ///
    /// # Panics
    /// When `high < low`.
    pub fn randint(&mut self, low: u32, high: u32) -> u32 {
        assert!(low <= high, "{low} to {high} is no range");
        low + self.below(high - low + 1)
    }

    /// As `shuffle(items)`.
    ///
    /// # Panics
    /// With 2^32 items or more.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            let count = u32::try_from(at + 1).expect("fewer than 2^32 items");
            items.swap(at, self.below(count) as usize);
        }
    }

    /// Python's `_randbelow`: as many bits as `count` has, drawn again while too large.
    fn below(&mut self, count: u32) -> u32 {
        let unused = count.leading_zeros();
        loop {
            let draw = self.next_u32() >> unused;
            if draw < count {
                return draw;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_those_that_python_prints() {
        // python3 -c "import random as r; g=r.Random(1); print(g.random(), g.randint(5,40),
        //   g.uniform(0,60), [g.randint(0,9) for _ in range(8)]); x=list(range(8)); g.shuffle(x);
        //   print(x); [g.random() for _ in range(1000)]; print(g.random())"
        let mut rng = PythonRandom::new(1);
        let first = (rng.random(), rng.randint(5, 40), rng.uniform(0.0, 60.0));
        assert_eq!(first, (0.134_364_244_112_401_22, 9, 15.304_141_544_365_3));
        assert_eq!(
            [(); 8].map(|()| rng.randint(0, 9)),
            [7, 7, 7, 6, 3, 1, 7, 0]
        );
        let mut items = [0, 1, 2, 3, 4, 5, 6, 7];
        rng.shuffle(&mut items);
        assert_eq!(items, [2, 5, 1, 7, 0, 4, 3, 6]);
        let last = (0..1001).map(|_| rng.random()).last();
        assert_eq!(last, Some(0.176_158_797_783_644_07));
    }
}
