//! W1, the agent fleet: 600 agents share a system prompt and tools of 4,096 tokens.
//!
//! Each agent runs 5 to 40 turns. A turn adds a task or tool result of 50 to 2,000 tokens and an
//! answer of 20 to 600, both log-uniform. 128 agents run at once, a finished one is replaced. A
//! request takes 0.2 s and 20 ms an answer token, a tool call 0.2 to 30 s, log-uniform. Own.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{self, Write};

use crate::python_random::PythonRandom;
use crate::workload::{Request, Span, Workload};

const PROGRAMS: u32 = 600;
const ACTIVE: u32 = 128;
const SYSTEM_TOKENS: u32 = 4096;
const SEED: u32 = 1;

/// The fleet, with the seconds at which its requests begin.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// Requests and their order.
    pub workload: Workload,
    /// Begin of each request, ascending.
    pub begins_s: Vec<f64>,
}

/// A turn that waits for its time. Times are positive, so their bits order like they do.
type Turn = (u64, u32, u32, u32, u32);

struct Agents {
    rng: PythonRandom,
    waiting: BinaryHeap<Reverse<Turn>>,
    started: u32,
}

impl Agents {
    fn start(&mut self, at_s: f64) {
        let program = self.started;
        self.started += 1;
        let turns = self.rng.randint(5, 40);
        self.waiting
            .push(Reverse((at_s.to_bits(), program, 0, SYSTEM_TOKENS, turns)));
    }

    fn log_uniform(&mut self, low: f64, high: f64) -> f64 {
        self.rng.uniform(low.ln(), high.ln()).exp()
    }

    fn tokens(&mut self, low: f64, high: f64) -> u32 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between low and high, which are token counts"
        )]
        let tokens = self.log_uniform(low, high) as u32;
        tokens
    }
}

impl Fleet {
    /// The fleet of all benches.
    pub fn new() -> Self {
        let rng = PythonRandom::new(SEED);
        let mut agents = Agents {
            rng,
            waiting: BinaryHeap::new(),
            started: 0,
        };
        for _ in 0..ACTIVE {
            let at_s = agents.rng.uniform(0.0, 60.0);
            agents.start(at_s);
        }
        let (mut requests, mut times_s) = (Vec::new(), Vec::new());
        while let Some(Reverse((at, program, turn, history, turns))) = agents.waiting.pop() {
            let at_s = f64::from_bits(at);
            let prompt = history + agents.tokens(50.0, 2000.0);
            let output = agents.tokens(20.0, 600.0);
            let total = prompt + output;
            let own = u64::from(1000 + program);
            let spans = vec![
                Span {
                    stream: 1,
                    start: 0,
                    len: SYSTEM_TOKENS,
                },
                Span {
                    stream: own,
                    start: SYSTEM_TOKENS,
                    len: total - SYSTEM_TOKENS,
                },
            ];
            requests.push(Request::new(spans, output));
            let end_s = at_s + 0.2 + 0.02 * f64::from(output);
            times_s.push((at_s, end_s));
            if turn + 1 < turns {
                let next_s = end_s + agents.log_uniform(0.2, 30.0);
                agents
                    .waiting
                    .push(Reverse((next_s.to_bits(), program, turn + 1, total, turns)));
            } else if agents.started < PROGRAMS {
                agents.start(end_s + 1.0);
            }
        }
        let begins_s = times_s.iter().map(|&(begin, _)| begin).collect();
        Self {
            workload: Workload::timed(requests, &times_s),
            begins_s,
        }
    }

    /// Writes the fleet as Mooncake rows with blocks of `block` tokens, in the order in which the
    /// requests begin. A whole block has one id wherever it occurs; a partial last one has an id
    /// of its own, as the next turn's prompt has other tokens there.
    ///
    /// # Errors
    /// The writer's.
    pub fn write_mooncake(&self, block: u32, out: &mut impl Write) -> io::Result<()> {
        let block = block.max(1);
        let shared = SYSTEM_TOKENS / block;
        // Per program, a range of ids for its whole blocks; partial ones are numbered above all.
        const IDS: u64 = 1 << 20;
        let mut partial = IDS << 20;
        for (request, begin_s) in self.workload.requests.iter().zip(&self.begins_s) {
            let own = request.spans.last().map_or(0, |span| span.stream) * IDS;
            let whole = request.prompt_len / block;
            let ids = (0..whole).map(|at| {
                if at < shared {
                    u64::from(at)
                } else {
                    own + u64::from(at)
                }
            });
            let mut ids: Vec<u64> = ids.collect();
            if !request.prompt_len.is_multiple_of(block) {
                ids.push(partial);
                partial += 1;
            }
            writeln!(
                out,
                "{{\"timestamp\": {:.0}, \"input_length\": {}, \"output_length\": {}, \
                 \"hash_ids\": {ids:?}}}",
                begin_s * 1000.0,
                request.prompt_len,
                request.total_len - request.prompt_len,
            )?;
        }
        Ok(())
    }
}

impl Default for Fleet {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fleet_has_the_size_that_its_records_name() {
        let fleet = Fleet::new();
        assert_eq!(fleet.workload.requests.len(), 13_650);
        assert_eq!(fleet.workload.ops.len(), 2 * 13_650);
        assert!(fleet.begins_s.is_sorted());
    }

    #[test]
    fn mooncake_rows_share_whole_blocks_only() {
        let mut text = Vec::new();
        Fleet::new().write_mooncake(128, &mut text).unwrap();
        let rows: Vec<serde_json::Value> = text
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_slice(line).unwrap())
            .collect();
        assert_eq!(rows.len(), 13_650);
        for row in &rows[..100] {
            let ids = row["hash_ids"].as_array().unwrap();
            let tokens = row["input_length"].as_u64().unwrap();
            assert_eq!(ids.len() as u64, tokens.div_ceil(128));
            let system: Vec<u64> = ids[..32].iter().map(|id| id.as_u64().unwrap()).collect();
            assert!(system.into_iter().eq(0..32));
        }
    }
}
