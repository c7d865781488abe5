//! API keys stay where they are: with everything logged that there is to log, on every route, in
//! both headers, right and wrong, no key is in the log, the journal, the metrics or an answer.
#![cfg(unix)]
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests stop at the first surprise"
)]

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

#[path = "support/running.rs"]
#[expect(
    dead_code,
    reason = "shared with tests that read the lines of the start"
)]
mod running;

use running::{rootstock, tiny_model};

const RIGHT: [&str; 2] = ["sk-right-Zq8vK2mXw4", "sk-other-Jt7bN5cRy1"];
const WRONG: [&str; 2] = ["sk-wrong-Hd3fL9pQs6", "sk-right-Zq8vK2mXw4x"];
const ROUTES: [(&str, &str); 12] = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/v1/kv/actions"),
    ("GET", "/v1/kv/tree"),
    ("GET", "/v1/kv/why/nothing"),
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/v1/nowhere"),
];
const BODIES: [&str; 3] = [
    "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"prompt\": \"a\", \
     \"input\": \"a\", \"max_tokens\": 2}",
    "{\"messages\": 7, \"prompt\": {}, \"input\": 7, \"max_tokens\": -1}",
    "{no json",
];

/// A file of this test, removed at its end.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str) -> Temporary {
        let name = format!("rootstock-keys-{}-{name}", std::process::id());
        Temporary(std::env::temp_dir().join(name))
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.0).unwrap()
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.0));
    }
}

fn start(model: &Path, keys: &Temporary, journal: &Temporary, log: &Temporary) -> (Child, String) {
    let path = |file: &Path| file.to_str().unwrap().to_owned();
    let words = [
        "--model",
        &path(model),
        "--port",
        "0",
        "--kv-cache-mib",
        "4",
        "--threads",
        "1",
        "--api-keys",
        &path(&keys.0),
        "--journal",
        &path(&journal.0),
    ];
    let mut command: Command = rootstock(&words);
    command
        .env("ROOTSTOCK_LOG", "trace")
        .stderr(File::create(&log.0).unwrap());
    let mut child = command.spawn().unwrap();
    for _ in 0..60_000 {
        let lines = String::from_utf8(log.bytes()).unwrap();
        let found = lines
            .lines()
            .find_map(|line| line.strip_prefix("listening"));
        if let Some(address) = found.filter(|_| lines.ends_with('\n')) {
            let address = address.trim().trim_start_matches("http://");
            return (child, address.trim_end_matches("/v1").to_owned());
        }
        std::thread::park_timeout(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    panic!(
        "it never listened: {}",
        String::from_utf8_lossy(&log.bytes())
    );
}

/// Head and body of an answer.
fn ask(address: &str, route: (&str, &str), header: &str, body: &str) -> String {
    let (method, path) = route;
    let mut socket = TcpStream::connect(address).unwrap();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n{header}\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    socket.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn keys_are_in_no_log_no_journal_no_metric_and_no_answer() {
    let model = tiny_model();
    let (keys, journal, log) = (
        Temporary::new("toml"),
        Temporary::new("journal"),
        Temporary::new("log"),
    );
    let row = |key: &str| format!("[[key]]\nkey = \"{key}\"\ntenant = \"t\"\n");
    std::fs::write(&keys.0, RIGHT.map(row).concat()).unwrap();
    let (mut child, address) = start(&model.path, &keys, &journal, &log);
    let mut heard = String::new();
    let (mut served, mut refused) = (0, 0);
    for key in RIGHT.into_iter().chain(WRONG) {
        for header in [
            format!("authorization: Bearer {key}"),
            format!("x-api-key: {key}"),
            format!("authorization: Basic {key}"),
            format!("cookie: key={key}\r\nx-api-key: {key}"),
        ] {
            for route in ROUTES {
                for body in BODIES {
                    let body = if route.0 == "GET" { "" } else { body };
                    let answer = ask(&address, route, &header, body);
                    served += u32::from(answer.starts_with("HTTP/1.1 200"));
                    refused += u32::from(answer.starts_with("HTTP/1.1 401"));
                    heard.push_str(&answer);
                }
            }
        }
        let path = format!("/v1/nowhere?api_key={key}");
        heard.push_str(&ask(
            &address,
            ("GET", &path),
            &format!("x-api-key: {key}"),
            "",
        ));
    }
    assert!(
        served > 80 && refused > 300,
        "{served} served, {refused} refused"
    );
    let id = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-TERM", &id])
            .status()
            .unwrap()
            .success()
    );
    assert!(child.wait().unwrap().success());

    let (log, journal) = (log.bytes(), journal.bytes());
    let shown = String::from_utf8_lossy(&log);
    assert!(
        shown.contains(" TRACE "),
        "all there is was logged: {shown}"
    );
    assert!(journal.len() > 1000, "requests were recorded");
    for key in RIGHT.into_iter().chain(WRONG) {
        for (name, bytes) in [
            ("the log", log.as_slice()),
            ("the journal", journal.as_slice()),
            ("an answer", heard.as_bytes()),
        ] {
            let found = bytes
                .windows(key.len())
                .any(|window| window == key.as_bytes());
            assert!(!found, "{name} has a key");
        }
    }
}
