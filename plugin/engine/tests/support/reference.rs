//! Reader of reference files (`tests/reference/make_reference.py` says what is in them).
#![allow(dead_code, reason = "each user needs its own part")]
#![expect(unreachable_pub, reason = "shared by test binaries and an example")]

/// One sequence of a reference.
pub struct Sequence {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// What the reference says of each position.
    pub rows: Vec<Row>,
}

/// The reference's logits after one position.
pub struct Row {
    /// Logarithm of the sum of exponentials of all logits.
    pub log_sum_exp: f32,
    /// The largest logits with their tokens, largest first.
    pub top: Vec<(u32, f32)>,
}

/// How far a path is from the reference over some positions.
#[derive(Debug, Default)]
pub struct Distance {
    pub positions: usize,
    pub same_best: usize,
    /// Largest difference of a logit among the reference's best.
    pub logit: f32,
    /// Sum over positions of the part of KL that the reference's best tokens make up.
    pub kl: f64,
}

impl Distance {
    pub fn add(&mut self, want: &Row, got: &[f32]) {
        self.positions += 1;
        self.same_best +=
            usize::from(rootstock_engine::kernels::argmax(got) == Some(want.top[0].0));
        let largest = got
            .iter()
            .fold(f32::NEG_INFINITY, |most, &logit| most.max(logit));
        let sum: f64 = got
            .iter()
            .map(|&logit| f64::from(logit - largest).exp())
            .sum();
        let log_sum_exp = sum.ln() + f64::from(largest);
        for &(token, logit) in &want.top {
            let ours = got[token as usize];
            let difference = (ours - logit).abs();
            assert!(difference.is_finite());
            self.logit = self.logit.max(difference);
            let log_p = f64::from(logit - want.log_sum_exp);
            self.kl += log_p.exp() * (log_p - (f64::from(ours) - log_sum_exp));
        }
    }
}

/// All sequences of a file; None where it is not one.
pub fn read(bytes: &[u8]) -> Option<Vec<Sequence>> {
    let mut rest = bytes.strip_prefix(b"RSREF1\0\0")?;
    let sequences = number(take(&mut rest, 4)?);
    let top = number(take(&mut rest, 4)?) as usize;
    let mut all = Vec::new();
    for _ in 0..sequences {
        let len = number(take(&mut rest, 4)?) as usize;
        let tokens = take(&mut rest, len * 2)?
            .chunks_exact(2)
            .map(number)
            .collect();
        let rows = (0..len)
            .map(|_| row(&mut rest, top))
            .collect::<Option<_>>()?;
        all.push(Sequence { tokens, rows });
    }
    rest.is_empty().then_some(all)
}

fn row(rest: &mut &[u8], top: usize) -> Option<Row> {
    let log_sum_exp = float(take(rest, 4)?)?;
    let mut best = Vec::with_capacity(top);
    for _ in 0..top {
        let token = number(take(rest, 2)?);
        best.push((token, float(take(rest, 4)?)?));
    }
    Some(Row {
        log_sum_exp,
        top: best,
    })
}

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (head, tail) = rest.split_at_checked(count)?;
    *rest = tail;
    Some(head)
}

fn number(bytes: &[u8]) -> u32 {
    bytes
        .iter()
        .rev()
        .fold(0, |n, &byte| n << 8 | u32::from(byte))
}

fn float(bytes: &[u8]) -> Option<f32> {
    bytes.try_into().ok().map(f32::from_le_bytes)
}
