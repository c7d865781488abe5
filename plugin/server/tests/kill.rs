//! The server ended by SIGKILL and SIGTERM in each phase of a request, and started again: whoever
//! asked gets a whole answer or none, the next server starts at once, and says what an undisturbed
//! one says; with the storage tier (feature `storage`) over what the dead one left in its folder.
//!
//! `ROOTSTOCK_KILLS=200` is the long form; the short one is each phase with each signal once.
#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

#[path = "support/running.rs"]
#[expect(dead_code, reason = "shared with the other tests of the binary")]
mod running;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use running::Running;
use serde_json::{Value, json};

/// Tokens of a prompt: as many pages as take several steps.
const LEN: u64 = 60 * 16 + 5;
const CONVERSATIONS: u64 = 4;

/// How far a request has come when the signal is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// Its connection is open.
    Connected,
    /// Its head has come, and half of its body.
    Body,
    /// All of it has come; it is queued, or its prompt is computed.
    Prefill,
    /// Its first token has been read.
    Decode,
    /// Its answer is over, what it computed goes to lower tiers.
    Ended,
    /// Somebody streams, and others wait.
    Crowd,
}

const PHASES: [Phase; 6] = [
    Phase::Connected,
    Phase::Body,
    Phase::Prefill,
    Phase::Decode,
    Phase::Ended,
    Phase::Crowd,
];

fn body(conversation: u64, stream: bool) -> String {
    let token = |at: u64| (at * 29 + at / 3 + conversation * 83) % 256;
    let prompt: Vec<u64> = (0..LEN).map(token).collect();
    let body = json!({"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0,
        "ignore_eos": true, "stream": stream});
    body.to_string()
}

/// What an undisturbed server says.
fn whole(server: &Running, conversation: u64) -> (String, u64) {
    let mut text = String::new();
    let mut answer = server.request("/v1/completions", &body(conversation, false));
    answer.read_to_string(&mut text).unwrap();
    let (head, json) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{text}");
    let answer: Value = serde_json::from_str(json).unwrap();
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    let said = answer["choices"][0]["text"].as_str().unwrap();
    (said.to_owned(), cached.as_u64().unwrap())
}

fn start(folder: &Path) -> Running {
    let uri = format!("fs://{}", folder.display());
    let storage = ["--storage", &uri, "--write-policy", "through"];
    let limits = ["--drain-timeout-s", "20", "--read-timeout-s", "2"];
    let host = ["--host-kv-mib", "4"];
    match cfg!(feature = "storage") {
        true => Running::start(&[&limits[..], &host, &storage].concat()),
        false => Running::start(&[&limits[..], &host].concat()),
    }
}

/// What a streamed answer said up to its end; `None` when it broke off before.
fn streamed(answer: &mut BufReader<TcpStream>, so_far: &str) -> Option<String> {
    let mut text = so_far.to_owned();
    // A connection that is reset has ended.
    answer.read_to_string(&mut text).ok();
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let data: Vec<&str> = data.collect();
    if data.last() != Some(&"[DONE]") {
        return None;
    }
    let events = data
        .iter()
        .filter_map(|line| serde_json::from_str(line).ok());
    let parts = events.filter_map(|event: Value| {
        let text = event["choices"][0]["text"].as_str();
        text.map(str::to_owned)
    });
    Some(parts.collect())
}

/// Brings a request so far and sends the signal; what its client got to read.
fn disturb(server: &Running, phase: Phase, signal: &str, conversation: u64) -> Option<String> {
    let asked = |conversation| server.request("/v1/completions", &body(conversation, true));
    match phase {
        Phase::Connected => {
            let _socket = TcpStream::connect(&server.address).unwrap();
            server.signal(signal);
            None
        }
        Phase::Body => {
            let mut socket = TcpStream::connect(&server.address).unwrap();
            let text = body(conversation, true);
            let head = "POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: ";
            write!(socket, "{head}{}\r\n\r\n", text.len()).unwrap();
            socket
                .write_all(&text.as_bytes()[..text.len() / 2])
                .unwrap();
            server.signal(signal);
            streamed(&mut BufReader::new(socket), "")
        }
        Phase::Prefill => {
            let mut answer = asked(conversation);
            server.signal(signal);
            streamed(&mut answer, "")
        }
        Phase::Decode => {
            let mut answer = asked(conversation);
            let mut begun = String::new();
            while !begun.contains("data: ") {
                assert!(answer.read_line(&mut begun).unwrap() > 0, "{begun}");
            }
            server.signal(signal);
            streamed(&mut answer, &begun)
        }
        Phase::Ended => {
            let said = streamed(&mut asked(conversation), "");
            server.signal(signal);
            said
        }
        Phase::Crowd => {
            let mut first = asked(conversation);
            let others: Vec<_> = (0..CONVERSATIONS).map(asked).collect();
            server.signal(signal);
            let said = streamed(&mut first, "");
            for mut other in others {
                streamed(&mut other, "");
            }
            said
        }
    }
}

fn folder() -> PathBuf {
    let path = std::env::temp_dir().join(format!("rootstock-kills-{}", std::process::id()));
    std::fs::remove_dir_all(&path).ok();
    path
}

#[test]
fn whenever_it_is_killed_the_next_one_starts_and_says_what_an_undisturbed_one_says() {
    let wanted = std::env::var("ROOTSTOCK_KILLS").ok();
    let rounds = wanted.map_or(2 * PHASES.len(), |text| text.parse().unwrap());
    let plain = Running::start(&[]);
    let texts: Vec<String> = (0..CONVERSATIONS)
        .map(|conversation| whole(&plain, conversation).0)
        .collect();
    plain.signal("-TERM");
    assert_eq!(plain.wait(), Some(0));
    let folder = folder();
    let (mut outcomes, mut found) = (BTreeMap::new(), 0);
    for round in 0..rounds {
        let phase = PHASES[round % PHASES.len()];
        let signal = ["-KILL", "-TERM"][round / PHASES.len() % 2];
        let conversation = (round as u64 * 7 + 1) % CONVERSATIONS;
        let text = &texts[usize::try_from(conversation).unwrap()];
        let mut server = start(&folder);
        let (said, cached) = whole(&server, (conversation + 1) % CONVERSATIONS);
        let expected = usize::try_from((conversation + 1) % CONVERSATIONS).unwrap();
        assert_eq!(said, texts[expected], "after round {round}");
        found += cached;
        let got = disturb(&server, phase, signal, conversation);
        if let Some(got) = &got {
            assert_eq!(got, text, "round {round}: {phase:?} {signal}");
        }
        match signal {
            "-KILL" => assert!(!server.child.wait().unwrap().success()),
            _ => assert_eq!(server.wait(), Some(0), "round {round}: {phase:?}"),
        }
        let is_drained = signal == "-TERM" && matches!(phase, Phase::Decode | Phase::Ended);
        assert!(!is_drained || got.is_some(), "round {round}: cut off");
        *outcomes.entry((phase, signal, got.is_some())).or_insert(0) += 1;
    }
    for ((phase, signal, is_whole), times) in outcomes {
        let got = if is_whole {
            "whole answers"
        } else {
            "no answer"
        };
        println!("{phase:?} {signal}: {times} {got}");
    }
    println!("{rounds} kills, {found} tokens found that dead servers had stored");
    let stored = cfg!(feature = "storage");
    assert_eq!(found > 0, stored, "what was stored is found");
    std::fs::remove_dir_all(&folder).ok();
}
