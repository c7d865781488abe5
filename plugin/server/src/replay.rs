//! `rootstock replay --trace`: which share of a trace's prompts a cache would have found, by
//! policy and capacity.
//!
//! Each pair of a policy and a capacity is replayed on the very cache that serves requests; beside
//! them stand the offline optimum and the cache without limit. Every hash id of a trace counts as
//! one block, a partial last one too, and requests run one after another in the order of their
//! arrival. Replays share the processors; each alone is one thread, so the figures do not depend
//! on how many there are.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use rootstock::radix::PolicyKind;

mod block_size;
mod columns;
mod error;
mod jobs;
mod mooncake;
mod optimum;
mod plot;
mod policy;
mod read;
mod report;
mod request_trace;
mod row;
mod signals;
mod step_model;
mod tally;
mod ticker;
mod trace;
mod tree;

use columns::Column;
use jobs::{Job, Line, Outcome, Setting};
use read::TraceFile;
use report::{INFINITE, OPTIMUM, ratio};
use step_model::StepModel;

pub use columns::Swept;
pub use error::ReplayError;
pub use policy::{Policy, UnknownPolicy};
pub use read::TraceForm;
pub use report::{Entry, Expected, Report};
pub use signals::Signal;
pub use tally::Times;

/// Flags of `rootstock replay --trace`, beside the trace itself.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ReplayFlags {
    /// Policies, separated by commas; lru is always among them [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "trace")]
    pub policies: Vec<Policy>,
    /// Capacities in tokens, separated by commas [default: 1/32 to all of the trace's blocks]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', requires = "trace")]
    pub capacity: Vec<u64>,
    /// Tokens of a host tier below the device; the optimum has both in one [default: none]
    ///
    /// One of --capacity, --host-capacity and --storage-capacity may be several sizes, separated by
    /// commas: they are the columns.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', requires = "trace")]
    pub host_capacity: Vec<u64>,
    /// Tokens of a storage tier below the host tier [default: none]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', requires = "trace")]
    pub storage_capacity: Vec<u64>,
    /// Journal of a run, whose step times tell how long prompts would take; see serve --journal
    #[arg(long, value_name = "JOURNAL", requires = "trace")]
    pub step_times: Option<PathBuf>,
    /// Signals of the rows that count, separated by commas [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "trace")]
    pub signals: Vec<Signal>,
    /// Tokens that a hash id of the trace stands for [default: told from the trace]
    #[arg(long, value_name = "TOKENS", requires = "trace")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub page_size: Option<u32>,
    /// Print JSON instead of a table
    #[arg(long, requires = "trace")]
    pub json: bool,
    /// Write the hit curves as an SVG file
    #[arg(long, value_name = "FILE", requires = "trace")]
    pub plot: Option<PathBuf>,
}

/// Replays the file `trace`, and writes the table or the JSON to `out`; progress goes to standard
/// error where that is a terminal.
///
/// # Errors
/// The trace or a flag is wrong, or a file cannot be read or written.
pub fn run(trace: &Path, flags: &ReplayFlags, out: &mut dyn Write) -> Result<(), ReplayError> {
    let report = replay(trace, flags)?;
    if let Some(path) = &flags.plot {
        write_file(path, plot::svg(&report).as_bytes())?;
    }
    let text = if flags.json {
        serde_json::to_string_pretty(&report).map_err(ReplayError::Json)? + "\n"
    } else {
        report.table()
            + &report.savings()
            + &report.times()
            + &report.expectations()
            + &report.closing()
    };
    let failed = |source| ReplayError::File {
        path: PathBuf::from("standard output"),
        source,
    };
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(failed)
}

/// Reads the trace and replays it at every policy and capacity.
///
/// # Errors
/// The trace or a flag is wrong, or the trace cannot be read.
pub fn replay(trace: &Path, flags: &ReplayFlags) -> Result<Report, ReplayError> {
    let reading = bar("reading", "{bytes} of {total_bytes}");
    let file = read::read_file(trace, flags.page_size, &flags.signals, &reading)?;
    reading.finish_and_clear();
    let (swept, columns) = columns::of(flags, &file)?;
    let model = flags.step_times.as_deref().map(StepModel::of_journal);
    let model = model.transpose()?;
    let policies = policies(&flags.policies).into_iter().map(Line::Policy);
    let jobs: Vec<Job> = policies
        .chain([Line::Optimum])
        .flat_map(|line| {
            let columns = columns.iter();
            columns.map(move |&column| Job { line, column })
        })
        .collect();
    let replaying = bar(
        "replaying",
        "{human_pos} of {human_len} requests, {per_sec}",
    );
    replaying.set_length(file.trace.len() as u64 * jobs.len() as u64);
    let setting = Setting {
        trace: &file.trace,
        page_tokens: file.page_tokens,
        model: model.as_ref(),
    };
    let outcomes = jobs::run_all(setting, &jobs, &replaying)?;
    replaying.finish_and_clear();
    Ok(gather(trace, &file, swept, &jobs, &outcomes))
}

/// The policies to replay: those asked for and `lru`, or all, in the order of the cache.
fn policies(asked: &[Policy]) -> Vec<Policy> {
    let wanted = |policy: &Policy| is_lru(*policy) || asked.is_empty() || asked.contains(policy);
    Policy::all().into_iter().filter(wanted).collect()
}

fn is_lru(policy: Policy) -> bool {
    policy.kind == PolicyKind::Lru
}

/// The report of all outcomes, with the line of the infinite cache as the last.
fn gather(
    path: &Path,
    file: &TraceFile,
    swept: Swept,
    jobs: &[Job],
    outcomes: &[Outcome],
) -> Report {
    let trace = &file.trace;
    let blocks = trace.total_blocks();
    let hits_of = |is: fn(Line) -> bool, column: Column| {
        let mut all = jobs.iter().zip(outcomes);
        let same = all.find(|(job, _)| is(job.line) && job.column == column);
        same.map_or(0, |(_, outcome)| outcome.totals.hits)
    };
    let entry = |job: &Job, policy, hits, outcome: Option<&Outcome>| Entry {
        policy,
        capacity_tokens: job.column.device.tokens,
        capacity_blocks: job.column.device.blocks,
        host_tokens: job.column.host.tokens,
        storage_tokens: job.column.storage.tokens,
        hit_blocks: hits,
        host_hit_blocks: outcome.map_or(0, |outcome| outcome.totals.host_hits),
        storage_hit_blocks: outcome.map_or(0, |outcome| outcome.totals.storage_hits),
        hit_ratio: ratio(hits, blocks).unwrap_or_default(),
        times_lru: ratio(hits, hits_of(is_lru_line, job.column)),
        share_of_optimum: ratio(hits, hits_of(is_optimum, job.column)),
        saved_tokens: outcome.map(|outcome| outcome.totals.saved_tokens),
        times: outcome.and_then(|outcome| outcome.totals.times),
        seconds: outcome.map(|outcome| outcome.took.as_secs_f64()),
        expected: outcome
            .and_then(|outcome| outcome.curve.as_ref())
            .map(Expected::all_of)
            .unwrap_or_default(),
    };
    let replayed = jobs
        .iter()
        .zip(outcomes)
        .map(|(job, outcome)| entry(job, name(job.line), outcome.totals.hits, Some(outcome)));
    let columns = jobs.iter().filter(|job| is_optimum(job.line));
    let infinite = columns.map(|job| entry(job, INFINITE, trace.infinite_hits(), None));
    Report {
        trace: path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
        form: file.form,
        requests: trace.len() as u64,
        page_tokens: file.page_tokens,
        swept,
        prompt_tokens: (0..trace.len())
            .map(|request| trace.prompt_tokens(request, file.page_tokens))
            .sum(),
        blocks,
        distinct_blocks: trace.distinct_blocks(),
        split_ids: trace.split_ids(),
        misfit_rows: file.misfits,
        results: replayed.chain(infinite).collect(),
    }
}

fn name(line: Line) -> &'static str {
    match line {
        Line::Policy(policy) => policy.name,
        Line::Optimum => OPTIMUM,
    }
}

fn is_lru_line(line: Line) -> bool {
    matches!(line, Line::Policy(policy) if is_lru(policy))
}

fn is_optimum(line: Line) -> bool {
    line == Line::Optimum
}

/// A progress bar on standard error, invisible where that is no terminal.
fn bar(what: &'static str, counts: &str) -> ProgressBar {
    let template = format!("{{prefix}} {{bar:30}} {counts}, {{eta}} left");
    let style =
        ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(0).with_style(style).with_prefix(what)
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), ReplayError> {
    File::create(path)
        .and_then(|mut file| file.write_all(bytes))
        .map_err(|source| ReplayError::File {
            path: path.to_owned(),
            source,
        })
}
