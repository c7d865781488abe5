//! A whole server over the parrot of the HTTP tests, for agent programs: the model says, turn by
//! turn, what a script file holds (see `script.rs` of the HTTP tests), and each request is a line
//! on standard output with the tokens of its prompt and how many of them were cached.
//!
//! `cargo run -p rootstock-tests --example scripted_server -- PORT SCRIPT [OPTIONS]`
//!
//! Options are JSON: `context`, `max_running`, `max_queue` and `signs_ms` (until the first sign of
//! life, between two of them, between two with content).
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    dead_code,
    reason = "it shares files with tests and stops at the first surprise"
)]

#[path = "../tests/http/parrot.rs"]
mod parrot;
#[path = "../tests/http/script.rs"]
mod script;
#[path = "../tests/http/tiny_model.rs"]
mod tiny_model;

use rootstock_engine::gguf::Gguf;
use rootstock_engine::service::{ModelIdentity, Service, ServiceConfig};
use rootstock_server::app::{ApiOptions, App};
use rootstock_server::chat::stream::Signs;
use rootstock_server::config::HttpLimits;
use rootstock_server::engine_port::Engine;
use rootstock_server::serve::{self, Bound};
use serde_json::Value;
use std::time::Duration;

const PAGE_TOKENS: u32 = 16;
/// Every byte is a token: an agent's prompt of 100 kB is 100,000 tokens.
const CONTEXT: u32 = 256 * 1024;
const PAGES: u32 = 4 * CONTEXT / PAGE_TOKENS;

#[tokio::main]
async fn main() {
    let mut words = std::env::args().skip(1);
    let port = words.next().map_or(0, |port| port.parse().unwrap());
    let script = std::fs::read_to_string(words.next().unwrap()).unwrap();
    let options = words.next().unwrap_or_else(|| "{}".to_owned());
    let options: Value = serde_json::from_str(&options).unwrap();
    let number = |value: &Value| value.as_u64().map(|found| u32::try_from(found).unwrap());
    let usual = ServiceConfig::default();
    let model = tiny_model::TinyModel::without_weights();
    let file = Gguf::open(&model.path).unwrap();
    let perch = parrot::Perch::default();
    perch.open();
    let backend = parrot::Parrot::new(&perch, PAGES, PAGE_TOKENS);
    let backend = backend.playing(script::Script::read(&script));
    let identity = ModelIdentity {
        name: "parrot".into(),
        revision: "1".into(),
        context: number(&options["context"]).unwrap_or(CONTEXT),
        weight_bytes: 0,
    };
    let config = ServiceConfig {
        page_size: PAGE_TOKENS,
        device_pages: Some(PAGES),
        step_tokens: 8192,
        max_running: number(&options["max_running"]).unwrap_or(usual.max_running),
        max_queue: number(&options["max_queue"]).unwrap_or(usual.max_queue),
        ..usual
    };
    let service = Service::start_with(config, vec![Box::new(backend)], identity).unwrap();
    let engine = Engine::new(service, &file).unwrap();
    let app = App::with(engine, HttpLimits::default(), api(&options["signs_ms"]));
    let listener = Bound::new("127.0.0.1", port)
        .await
        .unwrap()
        .listen()
        .unwrap();
    serve::run(app, listener, std::future::pending()).await;
}

/// The usual ways, perhaps with other signs of life.
fn api(signs_ms: &Value) -> ApiOptions {
    let usual = Signs::default();
    let at = |index: usize, usual: Duration| {
        signs_ms[index]
            .as_u64()
            .map_or(usual, Duration::from_millis)
    };
    ApiOptions {
        signs: Signs {
            first: at(0, usual.first),
            every: at(1, usual.every),
            content_every: at(2, usual.content_every),
        },
        ..ApiOptions::default()
    }
}
