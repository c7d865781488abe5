//! Shutdown (J4): running requests finish or end with an error, new ones are refused, probes tell
//! the truth. The signals themselves are tested on the binary, at the end.

use crate::client::Open;
use crate::server::{ParrotSetup, Server, until};
use rootstock_server::config::HttpLimits;
use serde_json::{Value, json};

fn completion(prompt: &str, stream: bool) -> Value {
    json!({"model": "m", "prompt": prompt, "max_tokens": 1000, "stream": stream})
}

fn until_draining(server: &Server) {
    until("the drain", || server.get("/ready").status == 503);
}

#[test]
fn while_draining_the_running_finish_the_new_are_refused_and_probes_tell() {
    let server = Server::parrot(ParrotSetup::default());
    let mut running = Open::start(server.address);
    running.post("/v1/completions", &completion("~ab@cd", true));
    server.perch.until_holding();
    server.begin_drain();
    until_draining(&server);
    assert_eq!(server.get("/health").status, 200, "alive while draining");
    let refused = server.post("/v1/completions", &completion("~x", false));
    assert_eq!(refused.status, 503);
    assert!(refused.header("retry-after").is_some());
    assert_eq!(refused.json()["error"]["code"], "draining");
    server.perch.open();
    let answer = running.answer();
    assert_eq!(answer.streamed_text(0), "ab@cd");
    assert!(answer.is_done());
    server.join();
    assert!(
        std::net::TcpStream::connect(server.address).is_err(),
        "nobody listens any more"
    );
}

#[test]
fn at_the_deadline_what_still_runs_ends_with_an_error() {
    let limits = HttpLimits {
        drain_timeout_s: 0,
        ..HttpLimits::default()
    };
    let server = Server::parrot(ParrotSetup {
        limits,
        ..ParrotSetup::default()
    });
    let mut streamed = Open::start(server.address);
    streamed.post("/v1/completions", &completion("~ab@cd", true));
    server.perch.until_holding();
    let mut plain = Open::start(server.address);
    plain.post("/v1/completions", &completion("~xyz", false));
    server.until_stats(|stats| stats.admitted == 2);
    server.begin_drain();
    let answer = streamed.answer();
    assert_eq!(answer.events().last().unwrap()["error"]["code"], "draining");
    assert!(!answer.is_done());
    assert_eq!(plain.answer().status, 503);
    server.perch.open();
    server.join();
}

#[test]
fn idle_connections_do_not_hold_up_the_end() {
    let server = Server::parrot(ParrotSetup::default());
    let mut idle = Open::start(server.address);
    idle.request("GET", "/health", &[], "");
    assert_eq!(idle.answer().status, 200);
    server.begin_drain();
    server.join();
    assert!(idle.is_closed());
}
