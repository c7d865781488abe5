//! Servers in this process, on a port of their own: over a parrot, or over a model file.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rootstock_engine::gguf::Gguf;
use rootstock_engine::service::{ModelIdentity, Service, ServiceConfig, Stats};
use rootstock_server::app::{ApiOptions, App};
use rootstock_server::config::HttpLimits;
use rootstock_server::control::memory::Memory;
use rootstock_server::engine_port::Engine;
use rootstock_server::kv_events::publisher::Feed;
use rootstock_server::load;
use rootstock_server::serve::{self, Bound};
use serde_json::Value;
use tokio::sync::oneshot;

use super::client::{self, Answer};
use super::parrot::{Parrot, Perch};
use super::script::Script;
use super::tiny_model::{CONTEXT, TinyModel};

/// Between two looks at a state that is awaited: a poll without a pause would take the processor
/// from those who bring the state about, and a port for each connection.
const POLL: Duration = Duration::from_millis(2);
/// Two minutes of looks: far beyond anything a healthy server needs.
const POLLS: u32 = 60_000;

/// Looks until a state is reached.
pub(crate) fn until(what: &str, mut reached: impl FnMut() -> bool) {
    for _ in 0..POLLS {
        if reached() {
            return;
        }
        std::thread::park_timeout(POLL);
    }
    panic!("{what} never came");
}

/// A running server.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) service: Service,
    /// The parrot's strings, where there is one.
    pub(crate) perch: Perch,
    stop: Mutex<Option<oneshot::Sender<()>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What a parrot's server is made with.
#[derive(Debug)]
pub(crate) struct ParrotSetup {
    pub(crate) service: ServiceConfig,
    pub(crate) limits: HttpLimits,
    pub(crate) options: ApiOptions,
    pub(crate) pages: u32,
    /// Where cache events go.
    pub(crate) feed: Option<Feed>,
    /// The chat template, where it is not that of ChatML.
    pub(crate) template: Option<String>,
    /// What the parrot says instead of its prompts.
    pub(crate) script: Option<Script>,
}

impl Default for ParrotSetup {
    fn default() -> Self {
        ParrotSetup {
            service: ServiceConfig {
                page_size: 16,
                ..ServiceConfig::default()
            },
            limits: HttpLimits {
                drain_timeout_s: 60,
                ..HttpLimits::default()
            },
            options: ApiOptions::default(),
            pages: 2048,
            feed: None,
            template: None,
            script: None,
        }
    }
}

impl Server {
    /// A server that repeats its prompts.
    pub(crate) fn parrot(setup: ParrotSetup) -> Server {
        let model = match &setup.template {
            Some(template) => TinyModel::with_template(template),
            None => TinyModel::without_weights(),
        };
        let file = Gguf::open(&model.path).unwrap();
        let perch = Perch::default();
        let page_tokens = setup.service.page_size;
        let backend = Parrot::new(&perch, setup.pages, page_tokens);
        let backend = match setup.script {
            Some(script) => backend.playing(script),
            None => backend,
        };
        let identity = ModelIdentity {
            name: "parrot".into(),
            revision: "1".into(),
            context: CONTEXT,
            weight_bytes: 0,
        };
        let memory: Arc<Memory> = Arc::default();
        let config = ServiceConfig {
            device_pages: Some(setup.pages),
            kv_events: Some(load::sink(setup.feed, Arc::clone(&memory))),
            ..setup.service
        };
        let service = Service::start_with(config, vec![Box::new(backend)], identity).unwrap();
        let engine = Engine::new(service.clone(), &file).unwrap();
        Server::start(
            service,
            engine.remembering(memory),
            (setup.limits, setup.options),
            perch,
        )
    }

    /// A server over a model file.
    pub(crate) fn model(path: &Path, config: ServiceConfig) -> Server {
        let file = Gguf::open(path).unwrap();
        let memory: Arc<Memory> = Arc::default();
        let config = ServiceConfig {
            kv_events: Some(load::sink(None, Arc::clone(&memory))),
            ..config
        };
        let service = Service::start(&file, config).unwrap();
        let engine = Engine::new(service.clone(), &file).unwrap();
        let engine = engine.remembering(memory);
        Server::start(service, engine, Default::default(), Perch::default())
    }

    fn start(
        service: Service,
        engine: Engine,
        (limits, options): (HttpLimits, ApiOptions),
        perch: Perch,
    ) -> Server {
        let app = App::with(engine, limits, options);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let bound = runtime.block_on(Bound::new("127.0.0.1", 0)).unwrap();
        let listener = runtime.block_on(async { bound.listen() }).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let run = serve::run(app, listener, async {
            // A dropped sender is a wish to stop too.
            drop(stopped.await);
        });
        let thread = std::thread::spawn(move || {
            runtime.block_on(run);
        });
        Server {
            address,
            service,
            perch,
            stop: Mutex::new(Some(stop)),
            thread: Mutex::new(Some(thread)),
        }
    }

    /// Posts JSON.
    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        client::post(self.address, path, body)
    }

    /// Gets a path.
    pub(crate) fn get(&self, path: &str) -> Answer {
        client::get(self.address, path)
    }

    /// The value of a metric line, label included.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let line = text
            .lines()
            .find(|line| line.split(' ').next() == Some(name));
        line.map_or(0.0, |line| {
            line.rsplit(' ').next().unwrap().parse().unwrap()
        })
    }

    /// Asks for the metrics until one has reached `least`.
    pub(crate) fn until_metric(&self, name: &str, least: f64) {
        until(name, || self.metric(name) >= least);
    }

    /// Asks for the engine's counters until they are as wanted.
    pub(crate) fn until_stats(&self, wanted: impl Fn(&Stats) -> bool) {
        until("the wanted counters of the engine", || {
            wanted(&self.service.stats())
        });
    }

    /// Begins the shutdown, as a signal would.
    pub(crate) fn begin_drain(&self) {
        drop(self.stop.lock().unwrap().take());
    }

    /// Waits for the end of the server's thread.
    pub(crate) fn join(&self) {
        if let Some(thread) = self.thread.lock().unwrap().take() {
            thread.join().unwrap();
        }
    }
}
