//! A whole server over the parrot of the HTTP tests, for agent programs: the model says, turn by
//! turn, what a script file holds (see `script.rs` of the HTTP tests), and each request is a line
//! on standard output with the tokens of its prompt and how many of them were cached.
//!
//! `cargo run -p rootstock-tests --example scripted_server -- PORT SCRIPT`
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
use rootstock_server::app::App;
use rootstock_server::config::HttpLimits;
use rootstock_server::engine_port::Engine;
use rootstock_server::serve::{self, Bound};

const PAGE_TOKENS: u32 = 16;
/// Every byte is a token: an agent's prompt of 100 kB is 100,000 tokens.
const CONTEXT: u32 = 256 * 1024;
const PAGES: u32 = 4 * CONTEXT / PAGE_TOKENS;

#[tokio::main]
async fn main() {
    let mut words = std::env::args().skip(1);
    let port = words.next().map_or(0, |port| port.parse().unwrap());
    let script = std::fs::read_to_string(words.next().unwrap()).unwrap();
    let model = tiny_model::TinyModel::without_weights();
    let file = Gguf::open(&model.path).unwrap();
    let perch = parrot::Perch::default();
    perch.open();
    let backend = parrot::Parrot::new(&perch, PAGES, PAGE_TOKENS);
    let backend = backend.playing(script::Script::read(&script));
    let identity = ModelIdentity {
        name: "parrot".into(),
        revision: "1".into(),
        context: CONTEXT,
        weight_bytes: 0,
    };
    let config = ServiceConfig {
        page_size: PAGE_TOKENS,
        device_pages: Some(PAGES),
        step_tokens: 8192,
        ..ServiceConfig::default()
    };
    let service = Service::start_with(config, vec![Box::new(backend)], identity).unwrap();
    let app = App::new(Engine::new(service, &file).unwrap(), HttpLimits::default());
    let listener = Bound::new("127.0.0.1", port)
        .await
        .unwrap()
        .listen()
        .unwrap();
    serve::run(app, listener, std::future::pending()).await;
}
