//! The binary as a user meets it: what it prints, how it exits, what signals do.
#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use std::io::{BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Output;

#[path = "support/running.rs"]
#[expect(dead_code, reason = "shared with the tests of the storage tier")]
mod running;

use running::{Running, rootstock};

fn run(arguments: &[&str]) -> Output {
    rootstock(arguments).output().unwrap()
}

/// The one line that a failed start leaves.
fn complaint(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "more than one line: {text}");
    assert!(!text.contains("panicked"), "{text}");
    text
}

#[test]
fn more_positions_than_the_model_was_trained_on_are_served_with_a_warning() {
    let server = Running::start(&["--max-model-len", "6000"]);
    let warned = |line: &String| line.starts_with("warning") && line.contains("4096");
    assert!(server.lines.iter().any(warned), "{:?}", server.lines);
    let body = format!("{{\"prompt\": {:?}, \"max_tokens\": 2}}", "x".repeat(5000));
    let mut answer = String::new();
    let mut asked = server.request("/v1/completions", &body);
    asked.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("\"prompt_tokens\":5000"), "{answer}");
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn a_wrong_flag_exits_with_2_and_names_it() {
    let output = run(&["--isa", "neon"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("neon"));
    assert_eq!(run(&["--no-such-flag"]).status.code(), Some(2));
}

#[test]
fn help_and_version_exit_with_0() {
    let help = run(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    for flag in ["--model", "--kv-cache-mib", "--journal", "--policy"] {
        assert!(help.contains(flag), "{flag}");
    }
    assert!(run(&["--version"]).stdout.starts_with(b"rootstock 0."));
}

#[test]
fn a_failed_start_is_one_line() {
    let text = complaint(&run(&["--model", "/nonexistent/model.gguf", "--port", "0"]));
    assert!(text.contains("/nonexistent/model.gguf"), "{text}");
    let text = complaint(&run(&["--page-size", "0"]));
    assert!(text.contains("--page-size is 0"), "{text}");
    let text = complaint(&run(&["--config", "/nonexistent.toml"]));
    assert!(text.contains("/nonexistent.toml"), "{text}");
    let junk = std::env::temp_dir().join(format!("rootstock-junk-{}.gguf", std::process::id()));
    std::fs::write(&junk, b"this is no model").unwrap();
    let text = complaint(&run(&["--model", junk.to_str().unwrap(), "--port", "0"]));
    std::fs::remove_file(&junk).unwrap();
    assert!(text.contains("rootstock-junk"), "{text}");
}

#[test]
fn a_port_in_use_is_noticed_before_a_model_is_looked_for() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let text = complaint(&run(&[
        "--model",
        "/nonexistent/model.gguf",
        "--port",
        &port,
    ]));
    assert!(text.contains(&port) && text.contains("--port"), "{text}");
}

#[test]
fn flags_beat_the_environment_which_beats_the_file() {
    let file = std::env::temp_dir().join(format!("rootstock-{}.toml", std::process::id()));
    std::fs::write(&file, "port = 1\nmax-queue = 2\nmax-running = 3\n").unwrap();
    let output = rootstock(&[
        "--config",
        file.to_str().unwrap(),
        "--port",
        "30",
        "--print-config",
    ])
    .env("ROOTSTOCK_PORT", "20")
    .env("ROOTSTOCK_MAX_QUEUE", "21")
    .output()
    .unwrap();
    std::fs::remove_file(&file).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("port = 30\n"), "{text}");
    assert!(text.contains("max-queue = 21\n"), "{text}");
    assert!(text.contains("max-running = 3\n"), "{text}");
    assert!(text.contains("page-size = 16\n"), "{text}");
}

#[test]
fn the_environment_does_not_disturb_subcommands() {
    let output = rootstock(&["serve", "--print-config"])
        .env("ROOTSTOCK_PORT", "77")
        .output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("port = 77"));
    let output = rootstock(&["replay", "--exact", "/nonexistent"])
        .env("ROOTSTOCK_PORT", "77")
        .output();
    assert!(complaint(&output.unwrap()).contains("/nonexistent"));
}

#[test]
fn the_start_tells_url_model_pages_and_cpu_and_sigterm_ends_with_0() {
    let server = Running::start(&["--isa", "scalar"]);
    let text = server.lines.join("\n");
    for part in [
        "tiny",
        "pages of 16 tokens",
        "scalar, 1 threads",
        "http://127.0.0.1:",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn a_running_answer_outlives_sigterm() {
    let server = Running::start(&[]);
    let body = r#"{"prompt": "x", "max_tokens": 300, "ignore_eos": true, "stream": true}"#;
    let mut answer = server.request("/v1/completions", body);
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(answer.read_line(&mut line).unwrap() > 0);
    }
    server.signal("-TERM");
    let mut rest = String::new();
    answer.read_to_string(&mut rest).unwrap();
    assert!(
        rest.contains("\"finish_reason\":\"length\"") && rest.contains("[DONE]"),
        "{rest}"
    );
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn a_second_signal_ends_at_once() {
    let server = Running::start(&["--drain-timeout-s", "3600"]);
    // A request that never comes to its end: its body is not sent.
    let mut socket = TcpStream::connect(&server.address).unwrap();
    socket
        .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 9\r\n\r\n{")
        .unwrap();
    // Its connection is taken before this answer is given.
    let mut answer = String::new();
    server
        .request("/v1/completions", "{}")
        .read_to_string(&mut answer)
        .unwrap();
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    server.signal("-INT");
    let mut stderr = server.stderr;
    let mut line = String::new();
    while !line.contains("draining") {
        line.clear();
        assert!(stderr.read_line(&mut line).unwrap() > 0);
    }
    let server = Running { stderr, ..server };
    server.signal("-INT");
    assert_eq!(server.wait(), Some(130));
}

#[test]
fn a_recorded_run_replays_exactly() {
    let journal = std::env::temp_dir().join(format!("rootstock-{}.journal", std::process::id()));
    let path = journal.to_str().unwrap();
    let server = Running::start(&["--journal", path]);
    for body in [
        r#"{"prompt": "one two three", "max_tokens": 20}"#,
        r#"{"prompt": "one two four"}"#,
    ] {
        let mut answer = String::new();
        server
            .request("/v1/completions", body)
            .read_to_string(&mut answer)
            .unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
    let output = run(&["replay", "--exact", path]);
    std::fs::remove_file(&journal).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.contains(" 0 differ") && text.contains("closed in order"),
        "{text}"
    );
}
