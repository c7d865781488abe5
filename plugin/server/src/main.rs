//! The `rootstock` binary: reads the command line, loads the model, serves until a signal.
#![forbid(unsafe_code)]

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use clap_complete::Shell;
#[cfg(feature = "otel")]
use rootstock_server::app::ApiOptions;
use rootstock_server::app::App;
use rootstock_server::bench;
#[cfg(feature = "cuda")]
use rootstock_server::bench_kernels;
use rootstock_server::chat_client::{self, ChatFlags};
use rootstock_server::cli::{Bench, Cli, Command, ReplayArgs, ServeArgs};
use rootstock_server::config::Config;
use rootstock_server::exact_replay;
use rootstock_server::kv_events::publisher::Publisher;
use rootstock_server::load::{Loaded, Loader};
use rootstock_server::options::LogFormatName;
use rootstock_server::replay;
use rootstock_server::request_trace::RequestTrace;
use rootstock_server::serve::{self, Bound};
#[cfg(feature = "otel")]
use rootstock_server::spans::otlp::{Exporter, OtlpError};
#[cfg(feature = "top")]
use rootstock_server::top;
use tokio::net::TcpListener;
use tracing_subscriber::EnvFilter;

/// Threads for HTTP; the arithmetic has its own.
const HTTP_THREADS: usize = 2;
/// Exit status of a start or a drain that was interrupted, as shells have it for programs that
/// were.
const INTERRUPTED: i32 = 130;
/// How long spans may take that are left when the drain has used its time.
#[cfg(feature = "otel")]
const LAST_SPANS: Duration = Duration::from_millis(500);
/// How long an interrupted download may take to clean up.
const CLEAN_UP: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Some(Command::Replay(args)) => replay(&args),
        Some(Command::Bench(args)) => match args.what {
            Bench::Agents(flags) => {
                bench::agents(&flags, &mut io::stdout().lock()).map_err(Into::into)
            }
            Bench::Report(flags) => {
                bench::report(&flags, &mut io::stdout().lock()).map_err(Into::into)
            }
            #[cfg(feature = "cuda")]
            Bench::Kernels(flags) => {
                bench_kernels::kernels(&flags, &mut io::stdout().lock()).map_err(Into::into)
            }
        },
        Some(Command::Chat(flags)) => chat(flags),
        #[cfg(feature = "top")]
        Some(Command::Top(flags)) => top::run(&flags).map_err(Into::into),
        Some(Command::Completions { shell }) => completions(shell),
        Some(Command::Serve(args)) => serve(*args),
        None => serve(cli.serve),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing is left to do when even this cannot be written.
            drop(writeln!(
                io::stderr(),
                "rootstock: {}",
                one_line(error.as_ref())
            ));
            ExitCode::FAILURE
        }
    }
}

fn chat(flags: ChatFlags) -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (mut lines, mut out) = (io::stdin().lock(), io::stdout().lock());
    let mut notes = io::stderr();
    let talk = chat_client::run(flags, &mut lines, &mut out, &mut notes);
    Ok(runtime.block_on(talk)?)
}

fn completions(shell: Shell) -> Result<(), Box<dyn Error>> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "rootstock", &mut text);
    Ok(io::stdout().write_all(&text)?)
}

/// The log goes to standard error.
fn log(format: LogFormatName) {
    let filter = EnvFilter::try_from_env("ROOTSTOCK_LOG")
        .unwrap_or_else(|_| EnvFilter::new("warn,rootstock_server=info,rootstock_engine=info"));
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    match format {
        LogFormatName::Text => lines.init(),
        LogFormatName::Json => lines.json().flatten_event(true).init(),
    }
}

/// The command line has exactly one of journal and trace.
fn replay(args: &ReplayArgs) -> Result<(), Box<dyn Error>> {
    let mut out = io::stdout().lock();
    if let Some(journal) = &args.exact {
        exact_replay::run(journal, &mut out)?;
    }
    if let Some(trace) = &args.trace {
        replay::run(trace, &args.flags, &mut out)?;
    }
    Ok(())
}

/// An error and its causes, without those that its own text already tells.
fn one_line(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text.replace('\n', " ")
}

fn serve(args: ServeArgs) -> Result<(), Box<dyn Error>> {
    let print_only = args.print_config;
    let config = args.config()?;
    if print_only {
        write!(io::stdout(), "{}", config.to_options().to_toml()?)?;
        return Ok(());
    }
    log(config.log_format);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(HTTP_THREADS)
        .enable_all()
        .build()?;
    runtime.block_on(run(config))
}

async fn run(config: Config) -> Result<(), Box<dyn Error>> {
    let mut signals = Signals::new()?;
    let bound = Bound::new(&config.host, config.port).await?;
    let limits = config.http;
    let mut options = config.api_options()?;
    let trace = (config.request_trace.clone(), config.page_tokens);
    #[cfg(feature = "otel")]
    let endpoint = config.otlp_endpoint.clone();
    let publisher = publisher(&config).await?;
    let mut loaded = load(config, publisher.as_ref(), &mut signals).await?;
    if let Some(publisher) = &publisher {
        loaded.lines.push(published(publisher));
    }
    if let (Some(path), page_tokens) = trace {
        let model = &loaded.engine.card().name;
        options.request_trace = Some(Arc::new(RequestTrace::open(&path, page_tokens, model)?));
    }
    #[cfg(feature = "otel")]
    let exporter = exporter(endpoint, &mut loaded, &mut options)?;
    let app = App::of(loaded.engine.publishing(publisher), limits, options);
    let listener = bound.listen()?;
    announce(&listener, &loaded.lines)?;
    let left = serve::run(app, listener, signals.first()).await;
    tracing::debug!(left_s = left.as_secs(), "drained");
    #[cfg(feature = "otel")]
    if let Some(exporter) = exporter
        && !exporter.finish(left.max(LAST_SPANS))
    {
        tracing::warn!("the drain deadline passed before all spans were sent");
    }
    Ok(())
}

/// The thread that sends spans, if they are wanted.
#[cfg(feature = "otel")]
fn exporter(
    endpoint: Option<String>,
    loaded: &mut Loaded,
    options: &mut ApiOptions,
) -> Result<Option<Exporter>, OtlpError> {
    let Some(endpoint) = endpoint else {
        return Ok(None);
    };
    let exporter = Exporter::start(&endpoint, &loaded.engine.card().name)?;
    options.spans = Some(exporter.spans());
    loaded.lines.push(format!("spans      {endpoint}"));
    Ok(Some(exporter))
}

/// Loads the model; a signal stops the download and leaves nothing half-done behind.
async fn load(
    config: Config,
    publisher: Option<&Publisher>,
    signals: &mut Signals,
) -> Result<Loaded, Box<dyn Error>> {
    let loader = Loader::new(config)?.feeding(publisher);
    let cancel = loader.cancel_flag();
    let mut loading = tokio::task::spawn_blocking(move || loader.load().map_err(Box::new));
    tokio::select! {
        loaded = &mut loading => Ok(loaded??),
        () = signals.next() => {
            cancel.store(true, Ordering::Relaxed);
            // Reading weights does not look at the flag, and has nothing to clean up.
            drop(tokio::time::timeout(CLEAN_UP, loading).await);
            std::process::exit(INTERRUPTED);
        }
    }
}

/// The publisher of cache events, if one is wanted.
async fn publisher(config: &Config) -> Result<Option<Publisher>, Box<dyn Error>> {
    match config.publisher_settings() {
        Some(settings) => Ok(Some(Publisher::bind(settings).await?)),
        None => Ok(None),
    }
}

fn published(publisher: &Publisher) -> String {
    let events = publisher.events_address();
    let replay = match publisher.replay_address() {
        Some(address) => format!("replay tcp://{address}"),
        None => "no replay".to_owned(),
    };
    let warning = if events.ip().is_loopback() {
        ""
    } else {
        " (they hold prompts: keep the network private)"
    };
    format!("KV events  tcp://{events}, {replay}{warning}")
}

fn announce(listener: &TcpListener, lines: &[String]) -> io::Result<()> {
    let mut out = io::stderr().lock();
    for line in lines {
        writeln!(out, "{line}")?;
    }
    writeln!(out, "listening  http://{}/v1", listener.local_addr()?)
}

/// SIGTERM and ctrl-C.
struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> io::Result<Signals> {
        Ok(Signals {
            #[cfg(unix)]
            terminate: tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?,
        })
    }

    /// Resolves at the first signal. From then on a second one ends the process at once.
    async fn first(mut self) {
        self.next().await;
        tokio::spawn(async move {
            self.next().await;
            std::process::exit(INTERRUPTED);
        });
    }

    #[cfg(unix)]
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    }

    #[cfg(not(unix))]
    async fn next(&mut self) {
        drop(tokio::signal::ctrl_c().await);
    }
}
