//! What a journal costs per step: 32 running requests with long contexts, with and without one.
//!
//! `cargo run --release -p rootstock --example journal_cost [CONTEXT_TOKENS] [STEPS]`. The load is
//! synthetic: the backend answers at once, so that all the time is the core's. The journal goes to
//! a file in the temporary folder. The runs alternate, the median of five counts. Where Linux tells
//! it, the time is what this thread spent on a processor, so that a busy machine does not matter.
#![expect(clippy::disallowed_methods, reason = "it measures wall time")]

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use rootstock::journal::{Journal, JournalLimits};
use rootstock::memory::ReplicaId;
use rootstock::radix::{CacheConfig, NamespaceId, NamespaceKey, Token};
use rootstock::scheduler::{NewRequest, RowOut, SamplingParams, SchedulerConfig};
use rootstock::scheduler::{StepOutput, StepPlan};
use rootstock::{CoreConfig, Limits, RouterConfig, ServingCore};

const REQUESTS: u32 = 32;
const RUNS: usize = 5;

fn config(context: u32, steps: u32) -> CoreConfig {
    let tokens = context + steps + 64;
    let device_pages = vec![REQUESTS * (tokens / 16 + 2)];
    let cache = CacheConfig {
        device_pages,
        ..CacheConfig::default()
    };
    let scheduler = SchedulerConfig {
        max_running: REQUESTS,
        step_tokens: 8192,
        max_model_len: tokens,
        ..SchedulerConfig::default()
    };
    CoreConfig {
        cache,
        scheduler,
        limits: Limits::default(),
        router: RouterConfig::default(),
    }
}

fn request(ns: NamespaceId, index: u32, context: u32, steps: u32) -> NewRequest {
    NewRequest {
        stop_tokens: vec![2],
        ignore_eos: true,
        sampling: SamplingParams::default(),
        label: u64::from(index),
        ..NewRequest::new(
            ns,
            (0..context).map(|i| index * 100_000 + i).collect(),
            steps + 32,
        )
    }
}

fn answer(plan: &StepPlan) -> StepOutput {
    let rows = plan.rows.iter().map(|row| {
        let mut out = RowOut::default();
        if row.sample.is_some() {
            out.accepted.push(row.first_pos as Token + 7);
        }
        out
    });
    StepOutput {
        rows: rows.collect(),
    }
}

/// A point in time, and in the processor time of this thread.
struct Clock {
    wall: Instant,
    processor_ns: Option<u64>,
}

impl Clock {
    fn now() -> Self {
        let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
        let processor_ns = schedstat.and_then(|text| text.split(' ').next()?.parse().ok());
        Self {
            wall: Instant::now(),
            processor_ns,
        }
    }

    fn elapsed(&self) -> Duration {
        match (self.processor_ns, Self::now().processor_ns) {
            (Some(begin), Some(end)) => Duration::from_nanos(end.saturating_sub(begin)),
            _ => self.wall.elapsed(),
        }
    }
}

/// What one run took and wrote.
struct Run {
    per_step: Duration,
    journal_bytes_per_step: u64,
}

/// Prefills all requests, then times decode steps of all of them.
fn run(context: u32, steps: u32, journal: Option<File>) -> Result<Run, Box<dyn Error>> {
    let config = config(context, steps);
    let mut core = ServingCore::new(config)?;
    if let Some(file) = journal {
        let limits = JournalLimits { max_bytes: 8 << 30 };
        core.set_journal(Some(Journal::new(Box::new(file), core.config(), limits)?));
    }
    let model = "m".to_owned();
    let ns = core.namespace(&NamespaceKey {
        model,
        ..NamespaceKey::default()
    })?;
    for index in 0..REQUESTS {
        core.add(request(ns, index, context, steps), 0);
    }
    let (mut now, mut emits, mut timed) = (0, Vec::new(), 0);
    let (mut begin, mut bytes_before) = (Clock::now(), 0);
    while timed < steps {
        now += 10_000_000;
        let plan = core.schedule(ReplicaId(0), now).ok_or("nothing to run")?;
        let output = answer(&plan);
        let decodes = plan.rows.len() == REQUESTS as usize && plan.tokens.len() == plan.rows.len();
        core.complete(ReplicaId(0), plan.id, &output, now);
        core.drain_emits(&mut emits);
        emits.clear();
        if decodes {
            timed += 1;
        } else {
            begin = Clock::now();
            bytes_before = core.stats().journal.map_or(0, |journal| journal.bytes);
        }
    }
    let spent = begin.elapsed();
    let bytes = core.stats().journal.map_or(0, |journal| journal.bytes);
    let journal_bytes_per_step = (bytes - bytes_before) / u64::from(steps);
    Ok(Run {
        per_step: spent / steps,
        journal_bytes_per_step,
    })
}

fn median(mut runs: Vec<Duration>) -> Duration {
    runs.sort();
    runs[runs.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<u32>());
    let context = args.next().transpose()?.unwrap_or(4096);
    let steps = args.next().transpose()?.unwrap_or(1000);
    let path = std::env::temp_dir().join(format!("rootstock-journal-{}", std::process::id()));
    let (mut without, mut with, mut bytes) = (Vec::new(), Vec::new(), 0);
    for _ in 0..RUNS {
        without.push(run(context, steps, None)?.per_step);
        let recorded = run(context, steps, Some(File::create(&path)?))?;
        with.push(recorded.per_step);
        bytes = recorded.journal_bytes_per_step;
    }
    std::fs::remove_file(&path)?;
    let (without, with) = (median(without), median(with));
    let journal = with.saturating_sub(without);
    let share = |step_ms: f64| journal.as_secs_f64() / (step_ms / 1e3) * 100.0;
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{REQUESTS} decodes a step, {context} tokens of context each, {steps} steps"
    )?;
    writeln!(out, "core without journal  {without:>10.1?} a step")?;
    writeln!(
        out,
        "core with journal     {with:>10.1?} a step, {bytes} bytes a step"
    )?;
    writeln!(out, "the journal           {journal:>10.1?} a step")?;
    for step_ms in [5.0, 20.0, 100.0] {
        writeln!(
            out,
            "  of a step of {step_ms:>3} ms  {:>8.3} %",
            share(step_ms)
        )?;
    }
    Ok(())
}
