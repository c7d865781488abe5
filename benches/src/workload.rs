//! Request streams for prefix-cache benches: seeded, and the same on every machine.
//!
//! A request's tokens, prompt then output, are spans of streams laid end to end, and a token is a
//! function of (stream, position), so a workload of 200 million tokens is a few hundred kilobytes.
//! A request begins with a match, a lease and room for what is not cached, and finishes by putting
//! prompt and output into the cache. Own.

use std::io::{self, Write};

use crate::python_random::PythonRandom;

/// First word of a workload file.
const MAGIC: u32 = 0x5750_4b31;

/// Tokens are 1 to this.
const VOCABULARY: u64 = 151_000;

/// Some tokens of a stream, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Which stream.
    pub stream: u64,
    /// Position of the first token in it.
    pub start: u32,
    /// Tokens.
    pub len: u32,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Tokens of the prompt.
    pub prompt_len: u32,
    /// Tokens of prompt and output.
    pub total_len: u32,
    /// What they are.
    pub spans: Vec<Span>,
}

impl Request {
    /// A request of these spans, all but the last `output_len` tokens its prompt.
    pub fn new(spans: Vec<Span>, output_len: u32) -> Self {
        let total_len = spans.iter().map(|span| span.len).sum();
        Self {
            prompt_len: total_len - output_len,
            total_len,
            spans,
        }
    }

    /// Appends the tokens of prompt and output to `out`.
    pub fn tokens(&self, out: &mut Vec<u32>) {
        for span in &self.spans {
            let positions = u64::from(span.start)..u64::from(span.start) + u64::from(span.len);
            out.extend(positions.map(|position| token(span.stream, position)));
        }
    }
}

/// A step of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// The request with this index begins.
    Begin(u32),
    /// It finishes.
    Finish(u32),
}

/// Requests, and the order in which they begin and finish.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Workload {
    /// The requests.
    pub requests: Vec<Request>,
    /// Each index occurs in one begin and one finish.
    pub ops: Vec<Op>,
}

impl Workload {
    /// Each request finishes before the next begins.
    pub fn one_by_one(requests: Vec<Request>) -> Self {
        let ops = (0..)
            .zip(&requests)
            .flat_map(|(at, _)| [Op::Begin(at), Op::Finish(at)]);
        Self {
            ops: ops.collect(),
            requests,
        }
    }

    /// Requests with their times of begin and end, in seconds. At equal times, finishes come
    /// before begins.
    pub fn timed(requests: Vec<Request>, times_s: &[(f64, f64)]) -> Self {
        let timed = (0..).zip(times_s);
        let mut ops: Vec<(f64, u8, u32)> = timed
            .flat_map(|(at, &(begin, end))| [(begin, 1, at), (end, 0, at)])
            .collect();
        ops.sort_by(|one, other| {
            one.0
                .total_cmp(&other.0)
                .then_with(|| (one.1, one.2).cmp(&(other.1, other.2)))
        });
        let op = |(_, kind, at)| {
            if kind == 1 {
                Op::Begin(at)
            } else {
                Op::Finish(at)
            }
        };
        Self {
            ops: ops.into_iter().map(op).collect(),
            requests,
        }
    }

    /// Tokens of all prompts.
    pub fn prompt_tokens(&self) -> u64 {
        self.requests
            .iter()
            .map(|request| u64::from(request.prompt_len))
            .sum()
    }

    /// Writes the workload as the little-endian words of a file: magic, counts of requests, ops
    /// and spans; per request prompt and total length, first span and count of spans; per op
    /// twice the request, plus 1 for a finish; per span stream (two words), start and length.
    ///
    /// # Errors
    /// The writer's.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let spans = self
            .requests
            .iter()
            .map(|request| request.spans.len())
            .sum();
        for word in [
            MAGIC,
            word(self.requests.len())?,
            word(self.ops.len())?,
            word(spans)?,
        ] {
            out.write_all(&word.to_le_bytes())?;
        }
        let mut first = 0;
        for request in &self.requests {
            let count = word(request.spans.len())?;
            for word in [request.prompt_len, request.total_len, first, count] {
                out.write_all(&word.to_le_bytes())?;
            }
            first += count;
        }
        for op in &self.ops {
            let word = match op {
                Op::Begin(at) => at << 1,
                Op::Finish(at) => at << 1 | 1,
            };
            out.write_all(&word.to_le_bytes())?;
        }
        for span in self.requests.iter().flat_map(|request| &request.spans) {
            out.write_all(&span.stream.to_le_bytes())?;
            out.write_all(&span.start.to_le_bytes())?;
            out.write_all(&span.len.to_le_bytes())?;
        }
        Ok(())
    }
}

fn word(count: usize) -> io::Result<u32> {
    u32::try_from(count).map_err(io::Error::other)
}

/// The token at `position` of `stream`: splitmix64's finalizer, reduced to the vocabulary.
fn token(stream: u64, position: u64) -> u32 {
    let mut x = stream
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(position);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^= x >> 31;
    (x % VOCABULARY) as u32 + 1
}

/// The shapes that trees are bad at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// 10,000 siblings of 64 tokens under 4,096 shared ones; the first 2,000 come again.
    Fanout,
    /// 4,000 prompts of 2,048 tokens that differ in the last 64; the first 1,000 come again.
    OneToken,
    /// One edge of 64,128 tokens, left at each of 1,000 places, in random order.
    Split,
    /// A prompt that grows by 64 tokens 1,024 times, then comes 100 times whole.
    Deep,
    /// 8 prompts of 131,072 tokens, each 8 times.
    Long,
}

impl Shape {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Fanout,
        Self::OneToken,
        Self::Split,
        Self::Deep,
        Self::Long,
    ];

    /// Its name in files and bench ids.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fanout => "fanout",
            Self::OneToken => "onetoken",
            Self::Split => "split",
            Self::Deep => "deep",
            Self::Long => "long128k",
        }
    }

    /// W3: the workload of this shape, without outputs, one request at a time.
    pub fn workload(self) -> Workload {
        Workload::one_by_one(match self {
            Self::Fanout => again(siblings(7, 4096, 10_000, 10_000), 2_000),
            Self::OneToken => again(siblings(8, 1984, 50_000, 4_000), 1_000),
            Self::Split => splits(),
            Self::Deep => {
                let mut requests: Vec<Request> = (1..=1024).map(|k| one(10, 64 * k)).collect();
                requests.extend((0..100).map(|_| one(10, 64 * 1024)));
                requests
            }
            Self::Long => (0..8)
                .flat_map(|_| (0..8).map(|prompt| one(11 + prompt, 131_072)))
                .collect(),
        })
    }
}

/// A prompt that is the beginning of one stream.
fn one(stream: u64, len: u32) -> Request {
    Request::new(
        vec![Span {
            stream,
            start: 0,
            len,
        }],
        0,
    )
}

/// Prompts that share `shared` tokens and go on with 64 of their own.
fn siblings(stream: u64, shared: u32, first_own: u64, count: u64) -> Vec<Request> {
    let own = first_own..first_own + count;
    own.map(|own| branch(stream, shared, own)).collect()
}

/// A prompt that leaves `stream` after `shared` tokens.
fn branch(stream: u64, shared: u32, own: u64) -> Request {
    let spans = [(stream, shared), (own, 64)].map(|(stream, len)| Span {
        stream,
        start: 0,
        len,
    });
    Request::new(spans.to_vec(), 0)
}

fn again(mut requests: Vec<Request>, count: usize) -> Vec<Request> {
    requests.extend_from_within(..count);
    requests
}

fn splits() -> Vec<Request> {
    let mut order: Vec<u32> = (1..=1000).collect();
    PythonRandom::new(3).shuffle(&mut order);
    let mut requests = vec![one(9, 64_128)];
    requests.extend(
        order
            .iter()
            .map(|k| branch(9, 64 * k, 90_000 + u64::from(*k))),
    );
    requests
}
