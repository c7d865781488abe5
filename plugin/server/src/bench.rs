//! `rootstock bench agents`: agent programs against a running server, this one or any other that
//! speaks OpenAI's chat completions.
//!
//! A program is a conversation that grows turn by turn. In the scenario `mixed` some programs are
//! user-facing and think between turns, others work in the background with short pauses of tools
//! for as long as the former run; in `nat` each program is the graph of seven calls of NVIDIA's
//! agent toolkit latency demo: one of high importance, four long ones side by side of low
//! importance, one of medium, and a short one of high importance. With `--hints` the calls say so
//! in `nvext`, which other servers ignore.
//!
//! `client.rs` speaks HTTP, `script.rs` says what is asked, `runner.rs` when, `report.rs` and
//! `plot.rs` tell what came of it. `records.rs` is `rootstock bench report`: tables and plots of
//! what benches recorded.

use std::io::Write;
use std::path::PathBuf;

mod client;
mod plot;
mod records;
mod report;
mod runner;
mod script;

use client::Target;
pub use records::{ReportFlags, report};
pub use report::{Call, Report};

/// What programs do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Scenario {
    /// User-facing programs among background ones.
    #[default]
    Mixed,
    /// The seven calls of the toolkit's latency demo.
    Nat,
}

/// Flags of `rootstock bench agents`.
#[derive(Clone, Debug, clap::Args)]
pub struct AgentFlags {
    /// Address of the server, up to but without /v1
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Name of the model to ask for
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub model: String,
    /// Key to send as bearer
    #[arg(long, env = "ROOTSTOCK_BENCH_API_KEY", value_name = "KEY")]
    pub api_key: Option<String>,
    /// What programs do
    #[arg(long, value_enum, default_value_t = Scenario::Mixed)]
    pub scenario: Scenario,
    /// User-facing programs at a time
    #[arg(long, value_name = "COUNT", default_value_t = 4)]
    pub users: u32,
    /// Background programs at a time
    #[arg(long, value_name = "COUNT", default_value_t = 24)]
    pub background: u32,
    /// Programs that each user runs, one after the other; with `nat` programs in all
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub programs: u32,
    /// Programs at a time with `nat`
    #[arg(long, value_name = "COUNT", default_value_t = 16)]
    pub concurrency: u32,
    /// Turns of a program
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub turns: u32,
    /// Mean seconds that a user thinks between turns; drawn from half to one and a half of it
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    pub think_s: f64,
    /// The same for the tools of background programs
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5)]
    pub tool_s: f64,
    /// Words of the system prompt, which all programs share
    #[arg(long, value_name = "WORDS", default_value_t = 200)]
    pub system_words: u32,
    /// Words of a user's message
    #[arg(long, value_name = "WORDS", default_value_t = 24)]
    pub user_words: u32,
    /// Words of a tool's result
    #[arg(long, value_name = "WORDS", default_value_t = 120)]
    pub tool_words: u32,
    /// Tokens of an answer to a user
    #[arg(long, value_name = "TOKENS", default_value_t = 48)]
    pub output_tokens: u32,
    /// Tokens of an answer to a background program
    #[arg(long, value_name = "TOKENS", default_value_t = 64)]
    pub background_output_tokens: u32,
    /// Say in nvext what is important and how long answers get
    #[arg(long)]
    pub hints: bool,
    /// Ask for the next turn's prompt to be computed ahead
    #[arg(long)]
    pub speculative_prefill: bool,
    /// Send ignore_eos, so that answers have their full length
    #[arg(long)]
    pub ignore_eos: bool,
    /// Seed of all words and pauses
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    pub seed: u64,
    /// Write all calls and the summary as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the distribution of the times to the first token as an SVG file
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// What stops a run; a call that fails is part of the report instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The address.
    #[error("--url is {url:?}; http://HOST[:PORT][/PATH] is wanted")]
    Url {
        /// What was given.
        url: String,
    },
    /// A number that makes no sense.
    #[error("--{flag} is {found}; {wanted}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// Its value.
        found: String,
        /// What is possible.
        wanted: &'static str,
    },
    /// Every call failed.
    #[error("all {calls} calls failed; the first: {first}")]
    AllFailed {
        /// How many.
        calls: usize,
        /// Why.
        first: String,
    },
    /// A file, or standard output.
    #[error("cannot write {path:?}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file that cannot be read.
    #[error("cannot read {path:?}: {source}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line of a file of records.
    #[error("{path:?}, line {line} is no record: {source}; see benches/peers")]
    Record {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: u32,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// The report as JSON.
    #[error("cannot write JSON: {0}")]
    Json(serde_json::Error),
    /// The runtime.
    #[error("cannot start: {0}")]
    Runtime(std::io::Error),
}

/// Runs the scenario and writes its table to `out`; a bar shows progress on standard error where
/// that is a terminal.
///
/// # Errors
/// A flag or a file is wrong, or nothing at all could be asked.
pub fn agents(flags: &AgentFlags, out: &mut dyn Write) -> Result<(), BenchError> {
    check(flags)?;
    let target = Target::new(&flags.url, flags.api_key.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(BenchError::Runtime)?;
    let calls = runtime.block_on(runner::run(flags, &target));
    let failed = calls.iter().filter_map(|call| call.error.clone());
    if let Some(first) = failed
        .clone()
        .next()
        .filter(|_| failed.count() == calls.len())
    {
        return Err(BenchError::AllFailed {
            calls: calls.len(),
            first,
        });
    }
    let report = Report::of(calls);
    if let Some(path) = &flags.json {
        let text = serde_json::to_string_pretty(&report).map_err(BenchError::Json)? + "\n";
        write_file(path, &text)?;
    }
    if let Some(path) = &flags.plot {
        write_file(path, &plot::svg(&report))?;
    }
    let path = PathBuf::from("standard output");
    out.write_all(report.table().as_bytes())
        .and_then(|()| out.flush())
        .map_err(|source| BenchError::File { path, source })
}

fn write_file(path: &PathBuf, text: &str) -> Result<(), BenchError> {
    std::fs::write(path, text).map_err(|source| BenchError::File {
        path: path.clone(),
        source,
    })
}

fn check(flags: &AgentFlags) -> Result<(), BenchError> {
    let counts = [
        ("turns", flags.turns),
        ("programs", flags.programs),
        ("concurrency", flags.concurrency),
        ("output-tokens", flags.output_tokens),
        ("background-output-tokens", flags.background_output_tokens),
        ("users", flags.users),
    ];
    if let Some(&(flag, found)) = counts.iter().find(|(_, count)| *count == 0) {
        return Err(BenchError::Flag {
            flag,
            found: found.to_string(),
            wanted: "1 or more is possible",
        });
    }
    let seconds = [("think-s", flags.think_s), ("tool-s", flags.tool_s)];
    match seconds.iter().find(|(_, s)| !(0.0..=3600.0).contains(s)) {
        Some(&(flag, found)) => Err(BenchError::Flag {
            flag,
            found: found.to_string(),
            wanted: "0 to 3600 seconds are possible",
        }),
        None => Ok(()),
    }
}
