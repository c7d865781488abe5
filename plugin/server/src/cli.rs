//! The command line. Flags, environment and file become one [`Config`]; nothing is started here.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

use crate::about;
use crate::bench::{AgentFlags, ReportFlags};
#[cfg(feature = "cuda")]
use crate::bench_kernels::KernelFlags;
use crate::chat_client::ChatFlags;
use crate::config::{Config, ConfigError};
use crate::free_memory::free_memory_bytes;
use crate::options::{FileError, Options};
use crate::replay::ReplayFlags;
#[cfg(feature = "top")]
use crate::top::TopFlags;

/// A KV-cache and scheduling core for agents, serving a GGUF model over an OpenAI-compatible API.
#[derive(Debug, Parser)]
#[command(name = "rootstock", version, long_version = about::long())]
#[command(args_conflicts_with_subcommands = true)]
#[command(
    after_help = "Every flag has an environment variable (ROOTSTOCK_PORT for --port) and a \
    key in the configuration file (port = 8000). Flags beat the environment, the environment \
    beats the file. ROOTSTOCK_LOG sets the log filter, e.g. debug."
)]
pub struct Cli {
    /// What to do; `serve` when absent.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Flags of `serve`.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP (the default)
    Serve(Box<ServeArgs>),
    /// Replay a trace to see what a cache would find, or a journal to compare every plan
    Replay(ReplayArgs),
    /// Measure a running server, this one or another; or show what was measured
    Bench(BenchArgs),
    /// Talk with a running server, and see what of each prompt was cached
    Chat(ChatFlags),
    /// Watch the cache of a running server
    #[cfg(feature = "top")]
    Top(TopFlags),
    /// Print completions for a shell
    Completions {
        /// For which shell
        shell: Shell,
    },
}

/// What to measure.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub what: Bench,
}

/// The measurements.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Agent programs of several turns against a server that speaks OpenAI's chat completions
    Agents(Box<AgentFlags>),
    /// Tables and plots of figures that benches recorded
    Report(ReportFlags),
    /// The CUDA kernels on a device: rates, shares of its bandwidth, overlap of copies
    #[cfg(feature = "cuda")]
    Kernels(KernelFlags),
}

/// Flags of `serve`.
#[derive(Debug, Default, Args)]
pub struct ServeArgs {
    /// The options that may also come from the environment or a file.
    #[command(flatten)]
    pub options: Options,
    /// Configuration file (TOML); its keys are the names of the flags
    #[arg(long, env = "ROOTSTOCK_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the configuration in effect as TOML and exit
    #[arg(long)]
    pub print_config: bool,
}

/// Flags of `replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// Journal written by `serve --journal`
    #[arg(long, value_name = "JOURNAL", required_unless_present = "trace")]
    #[arg(conflicts_with = "trace")]
    pub exact: Option<PathBuf>,
    /// Trace, plain or gzip: Mooncake rows, or a dynamo.request.trace.v1
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// What to replay of the trace.
    #[command(flatten)]
    pub flags: ReplayFlags,
}

/// A command line that cannot be followed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CliError {
    /// The configuration file.
    #[error(transparent)]
    File(#[from] FileError),
    /// A value.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl ServeArgs {
    /// The configuration in effect.
    ///
    /// # Errors
    /// When the file cannot be used or a value is out of its range.
    pub fn config(self) -> Result<Config, CliError> {
        let file = match &self.config {
            Some(path) => Options::from_file(path)?,
            None => Options::default(),
        };
        let options = self.options.or(file).or(standard_environment());
        Ok(Config::new(&options, free_memory_bytes())?)
    }
}

/// What programs of all kinds are told by the environment; weaker than what only this one is told.
fn standard_environment() -> Options {
    let mut options = Options::default();
    if cfg!(feature = "otel") {
        let endpoint = std::env::var("OTEL_EXPORTER_OTLP_ENDPOINT").ok();
        options.otlp_endpoint = endpoint.filter(|endpoint| !endpoint.is_empty());
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::CompatName;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn serve_is_the_default_and_takes_the_same_flags() {
        let bare = Cli::parse_from(["rootstock", "--port", "1"]);
        assert!(bare.command.is_none());
        assert_eq!(bare.serve.options.port, Some(1));
        let named = Cli::parse_from(["rootstock", "serve", "--port", "2"]);
        let Some(Command::Serve(args)) = named.command else {
            panic!("not serve")
        };
        assert_eq!(args.options.port, Some(2));
    }

    #[test]
    fn every_policy_of_cache_and_scheduler_can_be_chosen() {
        for policy in crate::replay::Policy::all() {
            let flags = ["rootstock", "--policy", policy.name];
            assert!(Cli::try_parse_from(flags).is_ok(), "{}", policy.name);
        }
        for order in ["priority", "lpm", "dfs-weight", "lof", "fcfs"] {
            let flags = ["rootstock", "--schedule-policy", order];
            assert!(Cli::try_parse_from(flags).is_ok(), "{order}");
        }
        let compat = Cli::parse_from(["rootstock", "--compat", "dynamo-1.6"]);
        assert_eq!(compat.serve.options.compat, Some(CompatName::Dynamo16));
        assert!(Cli::try_parse_from(["rootstock", "--policy", "random"]).is_err());
    }

    #[test]
    fn agents_are_benched_with_flags_of_their_own() {
        let flags = ["rootstock", "bench", "agents", "--users", "2", "--hints"];
        let cli = Cli::parse_from(flags);
        let Some(Command::Bench(BenchArgs {
            what: Bench::Agents(flags),
        })) = cli.command
        else {
            panic!("not bench")
        };
        assert_eq!((flags.users, flags.background, flags.hints), (2, 24, true));
    }

    #[test]
    fn a_report_needs_records() {
        let cli = Cli::parse_from([
            "rootstock",
            "bench",
            "report",
            "one.jsonl",
            "--plots",
            "out",
        ]);
        let Some(Command::Bench(BenchArgs {
            what: Bench::Report(flags),
        })) = cli.command
        else {
            panic!("not bench report")
        };
        assert_eq!(flags.files, [PathBuf::from("one.jsonl")]);
        assert!(Cli::try_parse_from(["rootstock", "bench", "report"]).is_err());
    }

    #[test]
    fn an_unknown_flag_is_refused() {
        assert!(Cli::try_parse_from(["rootstock", "--no-such-flag", "x"]).is_err());
        assert!(Cli::try_parse_from(["rootstock", "--isa", "neon"]).is_err());
    }
}
