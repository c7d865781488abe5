//! What the tests of the storage tier ask of a server: conversations as tokens, and where their
//! tokens came from.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::running::Running;

/// Whole pages of a conversation: so many that also the tiny model computes half of them slower
/// than they are copied.
pub(crate) const PAGES: u64 = 60;
/// Tokens of a conversation.
pub(crate) const LEN: u64 = PAGES * 16 + 5;
/// Of those, the ones that can be found.
pub(crate) const WHOLE: u64 = PAGES * 16;

/// A server with a store at this address; a host tier that holds some hundred pages.
pub(crate) fn start(uri: &str, more: &[&str]) -> Running {
    let fixed = [
        "--storage",
        uri,
        "--write-policy",
        "through",
        "--host-kv-mib",
        "4",
    ];
    Running::start(&[&fixed[..], more].concat())
}

/// An empty folder of this process's own.
pub(crate) fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("rootstock-{name}-{}", std::process::id()));
    std::fs::remove_dir_all(&path).ok();
    path
}

pub(crate) fn address_of(folder: &Path) -> String {
    format!("fs://{}", folder.display())
}

/// The JSON of an answer; `None` when the server went away meanwhile.
pub(crate) fn try_post(server: &Running, path: &str, body: &Value) -> Option<Value> {
    let mut text = String::new();
    let mut answer = server.try_request(path, &body.to_string()).ok()?;
    answer.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    assert!(head.starts_with("HTTP/1.1 200"), "{text}");
    serde_json::from_str(body).ok()
}

/// What an answer says, and where its prompt came from.
#[derive(Debug, PartialEq)]
pub(crate) struct Told {
    pub(crate) text: String,
    pub(crate) storage: u64,
    pub(crate) cached: u64,
}

/// A conversation and what comes of it.
pub(crate) fn try_ask(server: &Running, conversation: u64) -> Option<Told> {
    // The first half is common to neighbors, so that branches are read too.
    let prompt: Vec<u64> = (0..LEN)
        .map(|at| {
            let seed = if at < LEN / 2 {
                conversation / 4
            } else {
                conversation
            };
            (at * 29 + at / 3 + seed * 83 + seed * seed) % 256
        })
        .collect();
    let body = json!({"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0,
        "ignore_eos": true, "nvext": {"extra_fields": ["cache_report"]}});
    let answer = try_post(server, "/v1/completions", &body)?;
    let report = &answer["nvext"]["cache_report"];
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    let sources = [
        "device_tokens",
        "host_tokens",
        "storage_tokens",
        "computed_tokens",
    ];
    let sum: u64 = sources
        .map(|name| report[name].as_u64().unwrap())
        .iter()
        .sum();
    assert_eq!(sum, LEN, "{report}");
    Some(Told {
        text: answer["choices"][0]["text"].as_str().unwrap().to_owned(),
        storage: report["storage_tokens"].as_u64().unwrap(),
        cached: cached.as_u64().unwrap(),
    })
}

pub(crate) fn ask(server: &Running, conversation: u64) -> Told {
    try_ask(server, conversation).unwrap()
}

/// A number of `/v1/kv/stats` about the store.
pub(crate) fn store(server: &Running, name: &str) -> u64 {
    let mut text = String::new();
    let mut answer = server.get("/v1/kv/stats");
    answer.read_to_string(&mut text).unwrap();
    let (_, body) = text.split_once("\r\n\r\n").unwrap();
    let stats: Value = serde_json::from_str(body).unwrap();
    stats["store"][name].as_u64().unwrap()
}

/// Waits until a number about the store has come so far.
pub(crate) fn until(server: &Running, name: &str, least: u64) {
    for _ in 0..60_000 {
        if store(server, name) >= least {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    panic!("{name} never came to {least}");
}
