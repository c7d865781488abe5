//! W1, the agent fleet: 600 agents share a system prompt and tools of 4,096 tokens.
//!
//! Each agent runs 5 to 40 turns. A turn adds a task or tool result of 50 to 2,000 tokens and an
//! answer of 20 to 600, both log-uniform. 128 agents run at once, a finished one is replaced. A
//! request takes 0.2 s and 20 ms an answer token, a tool call 0.2 to 30 s, log-uniform. Own.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::io::{self, Write};

use crate::python_random::PythonRandom;
use crate::workload::{Request, Span, Workload};

const PROGRAMS: u32 = 600;
const ACTIVE: u32 = 128;
const SYSTEM_TOKENS: u32 = 4096;

/// Streams of programs begin here; that of the system prompt is 1.
const FIRST_STREAM: u64 = 1000;

/// What a request says about itself; true but where it is told to lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Note {
    /// Its program.
    pub program: u32,
    /// When it begins.
    pub begin_s: f64,
    /// Whether it is the program's last.
    pub last: bool,
    /// Seconds from its begin to that of the next; absent where none comes.
    pub gap_s: Option<f64>,
}

/// The fleet, with what its requests say.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// Requests and their order.
    pub workload: Workload,
    /// One for each request; begins ascend.
    pub notes: Vec<Note>,
}

/// A turn that waits for its time: begin, program, turn. Times are positive, so their bits order
/// like they do.
type Turn = (u64, u32, u32);

struct Program {
    turns: u32,
    /// What it has said and heard; thinking is marked.
    history: Vec<(Span, bool)>,
}

impl Program {
    fn len(&self) -> u32 {
        self.history.iter().map(|(span, _)| span.len).sum()
    }
}

struct Agents {
    rng: PythonRandom,
    waiting: BinaryHeap<Reverse<Turn>>,
    programs: Vec<Program>,
}

impl Agents {
    fn start(&mut self, at_s: f64) {
        let turns = self.rng.randint(5, 40);
        let system = Span {
            stream: 1,
            start: 0,
            len: SYSTEM_TOKENS,
        };
        self.waiting
            .push(Reverse((at_s.to_bits(), self.started(), 0)));
        self.programs.push(Program {
            turns,
            history: vec![(system, false)],
        });
    }

    fn started(&self) -> u32 {
        u32::try_from(self.programs.len()).unwrap_or(u32::MAX)
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

    /// What happens after a turn: seconds until the next, and whether a person takes it. `None`
    /// when the program is never heard of again.
    fn pause(&mut self, extended: bool) -> Option<(f64, bool)> {
        let draw = if extended { self.rng.random() } else { 1.0 };
        match draw {
            _ if draw < ABANDONED => None,
            _ if draw < ABANDONED + PERSON => Some((self.log_uniform(30.0, 600.0), true)),
            _ => Some((self.log_uniform(0.2, 30.0), false)),
        }
    }
}

/// Part of the turns of the extended fleet after which a program is abandoned without a word.
const ABANDONED: f64 = 0.01;

/// Part after which a person takes a pause of 30 to 600 s, before which thinking is stripped.
const PERSON: f64 = 0.15;

impl Fleet {
    /// The fleet of all benches, and of seed 1 the one that records name.
    pub fn new(seed: u32) -> Self {
        Self::with(seed, false)
    }

    /// The fleet with long pauses of people, abandoned programs, and answers of which two fifths
    /// are thinking, which the next turn of a person strips from the history.
    pub fn extended(seed: u32) -> Self {
        Self::with(seed, true)
    }

    fn with(seed: u32, extended: bool) -> Self {
        let mut agents = Agents {
            rng: PythonRandom::new(seed),
            waiting: BinaryHeap::new(),
            programs: Vec::new(),
        };
        for _ in 0..ACTIVE {
            let at_s = agents.rng.uniform(0.0, 60.0);
            agents.start(at_s);
        }
        let (mut requests, mut times_s, mut notes) = (Vec::new(), Vec::new(), Vec::new());
        while let Some(Reverse((at, number, turn))) = agents.waiting.pop() {
            let begin_s = f64::from_bits(at);
            let (added, output) = (agents.tokens(50.0, 2000.0), agents.tokens(20.0, 600.0));
            let program = &mut agents.programs[number as usize];
            let stream = FIRST_STREAM + u64::from(number);
            let (start, last) = (program.len(), turn + 1 >= program.turns);
            let thinking = if extended { output * 2 / 5 } else { 0 };
            // Where thinking was stripped, positions would repeat: each turn has its own stream.
            let stream = if extended {
                stream << 32 | u64::from(turn)
            } else {
                stream
            };
            let mut start = if extended { 0 } else { start };
            for (len, is_thinking) in [(added, false), (thinking, true), (output - thinking, false)]
            {
                program
                    .history
                    .push((Span { stream, start, len }, is_thinking));
                start += len;
            }
            let spans = program.history.iter().map(|&(span, _)| span);
            requests.push(Request::new(
                spans.filter(|span| span.len > 0).collect(),
                output,
            ));
            let end_s = begin_s + 0.2 + 0.02 * f64::from(output);
            times_s.push((begin_s, end_s));
            let mut gap_s = None;
            let goes_on = if last { None } else { agents.pause(extended) };
            if let Some((pause_s, person)) = goes_on {
                let next_s = end_s + pause_s;
                if person {
                    let history = &mut agents.programs[number as usize].history;
                    history.retain(|&(_, is_thinking)| !is_thinking);
                }
                gap_s = Some(next_s - begin_s);
                agents
                    .waiting
                    .push(Reverse((next_s.to_bits(), number, turn + 1)));
            } else if agents.started() < PROGRAMS {
                agents.start(end_s + 1.0);
            }
            notes.push(Note {
                program: number,
                begin_s,
                last,
                gap_s,
            });
        }
        Self {
            workload: Workload::timed(requests, &times_s),
            notes,
        }
    }

    /// Makes each note a lie with probability `share`: the last is not, another one is, and the
    /// gap is any from 0.3 s to 300 s.
    pub fn lie(&mut self, share: f64, seed: u32) {
        let mut rng = PythonRandom::new(seed);
        for note in &mut self.notes {
            if rng.random() < share {
                note.last = !note.last;
                note.gap_s = Some(rng.uniform(0.3_f64.ln(), 300.0_f64.ln()).exp());
            }
        }
    }

    /// Writes the fleet as Mooncake rows with blocks of `block` tokens, in the order in which the
    /// requests begin. A whole block has one id wherever it occurs after the same blocks; a
    /// partial last one has an id of its own, as the next turn's prompt has other tokens there.
    ///
    /// # Errors
    /// The writer's.
    pub fn write_mooncake(&self, block: u32, out: &mut impl Write) -> io::Result<()> {
        let mut ids = Ids::default();
        for (request, note) in self.workload.requests.iter().zip(&self.notes) {
            let output = request.total_len - request.prompt_len;
            let ids = ids.of(request, block.max(1));
            write!(
                out,
                "{{\"timestamp\": {:.0}, \"input_length\": {}, \"output_length\": {output}, \
                 \"hash_ids\": {ids:?}, \"session_id\": {}, \"session_final\": {}, \
                 \"osl\": {output}",
                note.begin_s * 1000.0,
                request.prompt_len,
                note.program,
                note.last,
            )?;
            if let Some(gap_s) = note.gap_s {
                write!(out, ", \"iat_ms\": {:.0}", gap_s * 1000.0)?;
            }
            writeln!(out, "}}")?;
        }
        Ok(())
    }
}

/// The content of a block: the block before it, and its spans.
type Content = (Option<u64>, Vec<(u64, u32, u32)>);

/// Numbers whole blocks by their content, in the order of their first appearance.
#[derive(Default)]
struct Ids {
    known: BTreeMap<Content, u64>,
    next: u64,
}

impl Ids {
    fn of(&mut self, request: &Request, block: u32) -> Vec<u64> {
        let (mut ids, mut before, mut spans, mut room) = (Vec::new(), None, Vec::new(), block);
        let mut left = request.prompt_len;
        for span in &request.spans {
            let mut span = Span {
                len: span.len.min(left),
                ..*span
            };
            left -= span.len;
            while span.len > 0 {
                let len = span.len.min(room);
                spans.push((span.stream, span.start, len));
                (span.start, span.len, room) = (span.start + len, span.len - len, room - len);
                if room == 0 {
                    let content = (before, std::mem::take(&mut spans));
                    let new = self.next;
                    let id = *self.known.entry(content).or_insert(new);
                    self.next += u64::from(id == new);
                    ids.push(id);
                    (before, room) = (Some(id), block);
                }
            }
        }
        if room < block {
            ids.push(self.next);
            self.next += 1;
        }
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMPT_TOKENS: u64 = 188_955_028;

    #[test]
    fn the_fleet_has_the_size_that_its_records_name() {
        let fleet = Fleet::new(1);
        assert_eq!(fleet.workload.requests.len(), 13_650);
        assert_eq!(fleet.workload.ops.len(), 2 * 13_650);
        assert!(
            fleet
                .notes
                .is_sorted_by(|one, next| one.begin_s <= next.begin_s)
        );
        let prompts = fleet
            .workload
            .requests
            .iter()
            .map(|one| u64::from(one.prompt_len));
        // python3 gen_workloads.py prints: w1_fleet.bin requests 13650 prompt tokens ...
        assert_eq!(prompts.sum::<u64>(), PROMPT_TOKENS);
    }

    #[test]
    fn mooncake_rows_share_whole_blocks_only() {
        let mut text = Vec::new();
        Fleet::new(1).write_mooncake(128, &mut text).unwrap();
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
