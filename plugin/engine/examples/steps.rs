//! Runs the steps of a journal again on the CPU backend, with one thread, and tells how well the
//! scheduler's model of step times knew each before it ran, by the thread's CPU time.
//!
//! ```text
//! cargo run --release -p rootstock-engine --example steps -- MODEL.gguf JOURNAL
//! ```
//! The journal is of a server with one replica (`rootstock serve --journal FILE`). KV is whatever
//! the pages hold: copies and storage are left out, texts mean nothing, times do not change by it.

#[path = "support/thread_cpu.rs"]
mod thread_cpu;

use std::fs::File;
use std::io::{BufReader, Write};
use std::path::Path;
use std::sync::Arc;

use rootstock::Backend;
use rootstock::journal::{JournalReader, replay_with};
use rootstock::memory::StepId;
use rootstock::scheduler::{RowInput, StepLoad, StepPlan, StepTime};
use rootstock_engine::cpu_backend::{CpuBackend, CpuBackendConfig};
use rootstock_engine::gguf::Gguf;
use rootstock_engine::model::Model;
use rootstock_kernels::Isa;
use thread_cpu::thread_cpu_ns;

type AnyError = Box<dyn std::error::Error>;

fn main() -> Result<(), AnyError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, journal] = args.as_slice() else {
        return Err("usage: steps MODEL.gguf JOURNAL".into());
    };
    let reader = JournalReader::open(BufReader::new(File::open(journal)?))?;
    let cache = &reader.config().cache;
    let file = Gguf::open(Path::new(model))?;
    let config = CpuBackendConfig {
        pages: *cache.device_pages.first().ok_or("no device tier")?,
        page_tokens: cache.page_tokens,
        threads: 1,
        ..CpuBackendConfig::default()
    };
    let model = Model::load(&file, Isa::detect(), 1)?;
    let mut backend = CpuBackend::new(Arc::new(model), &config, None)?;
    let mut steps: Vec<(StepLoad, u64)> = Vec::new();
    let mut failed = None;
    replay_with(BufReader::new(File::open(journal)?), |plan| {
        match run(&mut backend, plan) {
            Ok(step) => steps.extend(step),
            Err(error) => failed = Some(error),
        }
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    tell(&steps)
}

/// Runs a plan that computes something: its load and nanoseconds.
fn run(backend: &mut CpuBackend, plan: &StepPlan) -> Result<Option<(StepLoad, u64)>, AnyError> {
    if plan.rows.is_empty() || plan.rows.iter().any(|row| row.input != RowInput::Known) {
        return Ok(None);
    }
    let mut rows = plan.rows.clone();
    for row in &mut rows {
        row.mask = None;
    }
    let plan = StepPlan {
        id: StepId(plan.id.0),
        replica: plan.replica,
        rows,
        tokens: plan.tokens.clone(),
        page_tables: plan.page_tables.clone(),
        copies: Vec::new(),
        after: Vec::new(),
        overtakes: false,
    };
    let load = StepLoad::of(
        plan.rows
            .iter()
            .map(|row| (row.first_pos, row.len, row.sample.is_some())),
    );
    let id = plan.id;
    let start = thread_cpu_ns()?;
    backend.launch(plan)?;
    backend.wait(id)?;
    Ok(Some((load, thread_cpu_ns()? - start)))
}

fn tell(steps: &[(StepLoad, u64)]) -> Result<(), AnyError> {
    let mut model = StepTime::default();
    let mut errors = Vec::new();
    for &(load, ns) in steps {
        if let Some(told) = model.predict(load) {
            errors.push(told.abs_diff(ns) as f64 / ns as f64 * 100.0);
        }
        model.learn(load, ns);
    }
    errors.sort_by(f64::total_cmp);
    let at = |percent: usize| errors.get(errors.len() * percent / 100).copied();
    let (Some(half), Some(most)) = (at(50), at(95)) else {
        return Err("too few steps to learn from".into());
    };
    let [base, token, draw, one, chunk] = model.coefficients();
    writeln!(
        std::io::stdout(),
        "{} steps, thread CPU time: {:.2} ms + {:.1} us a token + {:.1} us a draw + {one:.1} ns \
         a KV position of a decode + {chunk:.1} ns one of a chunk; told ahead within {half:.1} % \
         at the median, {most:.1} % at p95",
        steps.len(),
        base / 1e6,
        token / 1e3,
        draw / 1e3,
    )?;
    Ok(())
}
