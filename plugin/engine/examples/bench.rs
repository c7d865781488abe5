//! Speed of the CPU backend alone: prefill, decode in batches, and a second turn on a cached
//! prefix. It serves the decision which kernel to improve next, and is one half of the pair with
//! llama.cpp (`benches/record`).
//!
//! ```text
//! cargo run --release -p rootstock-engine --example bench -- MODEL.gguf [threads] [isa]
//! ```
//! With one thread the time is that thread's CPU time, so that other work on the machine does not
//! count; with more it is wall time, the best and the median of several runs.

#[path = "support/thread_cpu.rs"]
mod thread_cpu;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rootstock::Backend;
use rootstock::memory::{PageId, ReplicaId, StepId};
use rootstock::radix::{CacheConfig, NamespaceId, NamespaceKey, PrefixCache, Token};
use rootstock::scheduler::{RequestId, Row, RowInput, SampleSpec, SamplingParams, StepPlan};
use rootstock_engine::cpu_backend::{CpuBackend, CpuBackendConfig};
use rootstock_engine::gguf::Gguf;
use rootstock_engine::model::Model;
use rootstock_kernels::Isa;
use thread_cpu::thread_cpu_ns;

type AnyError = Box<dyn std::error::Error>;

/// Tokens a step computes at most, the scheduler's default.
const STEP_TOKENS: u32 = 512;
const PAGE_TOKENS: u32 = 16;
/// Pages of one sequence: 2560 positions.
const SEQUENCE_PAGES: u32 = 160;

fn main() -> Result<(), AnyError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let path = args
        .first()
        .ok_or("usage: bench MODEL.gguf [threads] [isa]")?;
    let threads: usize = args.get(1).map_or(Ok(2), |text| text.parse())?;
    let isa = Isa::parse(args.get(2).map_or("auto", String::as_str))?;
    let mut bench = Bench::new(Path::new(path), threads, isa)?;
    let mut out = std::io::stdout();
    writeln!(
        out,
        "rootstock {} threads {threads} clock {}",
        isa.name(),
        bench.clock.name()
    )?;
    for tokens in [64, 512, 2048] {
        let times = bench.prefills(tokens, if tokens > 1000 { 2 } else { 6 })?;
        let speed = |at: usize| {
            times
                .get(at)
                .map_or(f64::NAN, |time| f64::from(tokens) / time)
        };
        writeln!(
            out,
            "prefill {tokens}: median {:.1} best {:.1} tok/s",
            speed(times.len() / 2),
            speed(0)
        )?;
    }
    for batch in [1, 4, 8, 16] {
        let times = bench.decodes(batch, 64, if threads == 1 { 24 } else { 60 })?;
        let speed = |at: usize| {
            times
                .get(at)
                .map_or(f64::NAN, |time| f64::from(batch) / time)
        };
        writeln!(
            out,
            "decode ctx64 b{batch}: best {:.1} median {:.1} tok/s",
            speed(0),
            speed(times.len() / 2)
        )?;
    }
    let (first, second) = bench.second_turn()?;
    writeln!(
        out,
        "TTFT: first turn 1024 tok {:.1} ms; second turn +64 on cached prefix {:.1} ms",
        first * 1e3,
        second * 1e3
    )?;
    Ok(())
}

#[derive(Clone, Copy)]
enum Clock {
    ThreadCpu,
    Wall,
}

impl Clock {
    fn name(self) -> &'static str {
        match self {
            Self::ThreadCpu => "thread CPU time",
            Self::Wall => "wall",
        }
    }

    /// Seconds that `run` took.
    fn time(self, run: impl FnOnce() -> Result<(), AnyError>) -> Result<f64, AnyError> {
        match self {
            Self::ThreadCpu => {
                let start = thread_cpu_ns()?;
                run()?;
                Ok((thread_cpu_ns()? - start) as f64 / 1e9)
            }
            Self::Wall => {
                #[expect(clippy::disallowed_methods, reason = "a bench measures time")]
                let start = Instant::now();
                run()?;
                Ok(start.elapsed().as_secs_f64())
            }
        }
    }
}

struct Bench {
    backend: CpuBackend,
    ns: NamespaceId,
    next_step: u64,
    clock: Clock,
}

/// A part of a sequence: its number decides its pages.
struct Part {
    sequence: u32,
    first_pos: u32,
    tokens: Vec<Token>,
}

impl Bench {
    fn new(path: &Path, threads: usize, isa: Isa) -> Result<Self, AnyError> {
        let file = Gguf::open(path)?;
        let model = Model::load(&file, isa, threads)?;
        let config = CpuBackendConfig {
            pages: 16 * SEQUENCE_PAGES,
            page_tokens: PAGE_TOKENS,
            threads,
            ..CpuBackendConfig::default()
        };
        let backend = CpuBackend::new(Arc::new(model), &config, None)?;
        let cache = CacheConfig {
            device_pages: vec![1],
            ..CacheConfig::default()
        };
        let key = NamespaceKey {
            model: String::new(),
            numerics: String::new(),
            lora: None,
            salt: None,
        };
        let ns = PrefixCache::new(&cache)?.namespace(&key)?;
        let clock = if threads == 1 {
            Clock::ThreadCpu
        } else {
            Clock::Wall
        };
        Ok(Self {
            backend,
            ns,
            next_step: 1,
            clock,
        })
    }

    /// Times of cold prefills of `tokens` tokens, ascending.
    fn prefills(&mut self, tokens: u32, runs: u32) -> Result<Vec<f64>, AnyError> {
        sorted((0..runs).map(|_| self.timed(|bench| bench.extend(0, 0, prompt(tokens, 0)))))
    }

    /// Times of decode steps of `batch` sequences after `context` tokens, ascending.
    fn decodes(&mut self, batch: u32, context: u32, steps: u32) -> Result<Vec<f64>, AnyError> {
        for sequence in 0..batch {
            self.extend(sequence, 0, prompt(context, sequence))?;
        }
        sorted((0..steps).map(|step| {
            let part = |sequence| Part {
                sequence,
                first_pos: context + step,
                tokens: vec![5 + sequence],
            };
            self.timed(|bench| bench.step((0..batch).map(part).collect()))
        }))
    }

    fn second_turn(&mut self) -> Result<(f64, f64), AnyError> {
        let first = self.timed(|bench| bench.extend(0, 0, prompt(1024, 0)))?;
        let again = |_| {
            let turn = (100..164).collect();
            self.timed(|bench| bench.extend(0, 1024, turn))
        };
        let second = sorted((0..3).map(again))?;
        Ok((first, second.get(1).copied().unwrap_or(f64::NAN)))
    }

    fn timed(
        &mut self,
        run: impl FnOnce(&mut Self) -> Result<(), AnyError>,
    ) -> Result<f64, AnyError> {
        let clock = self.clock;
        clock.time(|| run(self))
    }

    /// Computes tokens of a sequence in steps, the last of which samples.
    fn extend(&mut self, sequence: u32, first: u32, tokens: Vec<Token>) -> Result<(), AnyError> {
        let mut first_pos = first;
        for chunk in tokens.chunks(STEP_TOKENS as usize) {
            self.step(vec![Part {
                sequence,
                first_pos,
                tokens: chunk.to_vec(),
            }])?;
            first_pos += STEP_TOKENS;
        }
        Ok(())
    }

    fn step(&mut self, parts: Vec<Part>) -> Result<(), AnyError> {
        let id = StepId(self.next_step);
        self.next_step += 1;
        let mut plan = StepPlan {
            id,
            replica: ReplicaId(0),
            rows: Vec::new(),
            tokens: Vec::new(),
            page_tables: Vec::new(),
            copies: Vec::new(),
            after: Vec::new(),
            overtakes: false,
        };
        for part in parts {
            let tokens = u32::try_from(plan.tokens.len())?;
            let pages = u32::try_from(plan.page_tables.len())?;
            let len = u32::try_from(part.tokens.len())?;
            let first_page = part.sequence * SEQUENCE_PAGES + 1;
            let count = (part.first_pos + len).div_ceil(PAGE_TOKENS);
            plan.tokens.extend(part.tokens);
            plan.page_tables
                .extend((first_page..first_page + count).map(PageId::new));
            plan.rows.push(Row {
                request: RequestId(u64::from(part.sequence) + 1),
                ns: self.ns,
                tokens: tokens..tokens + len,
                input: RowInput::Known,
                first_pos: part.first_pos,
                len,
                pages: pages..pages + count,
                sample: Some(SampleSpec {
                    params: Arc::new(SamplingParams::greedy()),
                    output_index: 0,
                    suppress: None,
                    history: None,
                }),
                drafts: 0,
                guesses: tokens + len..tokens + len,
                mask: None,
            });
        }
        self.backend.launch(plan)?;
        self.backend.wait(id)?;
        Ok(())
    }
}

fn prompt(tokens: u32, salt: u32) -> Vec<Token> {
    (0..tokens)
        .map(|i| (i * 7919 + 11 + salt) % 49000)
        .collect()
}

fn sorted(times: impl Iterator<Item = Result<f64, AnyError>>) -> Result<Vec<f64>, AnyError> {
    let mut times = times.collect::<Result<Vec<f64>, _>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times)
}
