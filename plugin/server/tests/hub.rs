//! `--model hf:ORG/REPO` from a hub on this machine: a server that serves what it downloaded, and
//! what a start that fails says.
#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[path = "../../engine/tests/support/hub.rs"]
mod hub;
#[path = "support/running.rs"]
#[expect(dead_code, reason = "shared with the other tests of the binary")]
mod running;

use hub::{Hub, REPOSITORY};
use running::{rootstock, tiny_model};

fn cache(name: &str) -> PathBuf {
    let name = format!("rootstock-hub-{}-{name}", std::process::id());
    std::env::temp_dir().join(name)
}

fn command(address: &str, cache: &Path) -> Command {
    let spec = format!("hf:{REPOSITORY}");
    let small = ["--kv-cache-mib", "4", "--threads", "1", "--port", "0"];
    let mut command = rootstock(&[&["--model", &spec][..], &small].concat());
    command
        .env("HF_ENDPOINT", address)
        .env("ROOTSTOCK_CACHE", cache);
    command
}

/// Starts a server; what it wrote until it listened.
fn lines(address: &str, cache: &Path) -> Vec<String> {
    let mut child = command(address, cache)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = Vec::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        lines.push(line.unwrap());
        if lines
            .last()
            .is_some_and(|line| line.starts_with("listening"))
        {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    lines
}

#[test]
fn a_server_starts_from_a_repository_and_again_without_the_hub() {
    let model = std::fs::read(&tiny_model().path).unwrap();
    let hub = Hub::with_files(&[("README.md", b"x"), ("tiny-Q8_0.gguf", &model)]);
    let cache = cache("serve");
    let first = lines(&hub.address, &cache);
    assert!(first.last().unwrap().starts_with("listening"), "{first:?}");
    let says = |line: &&String| line.contains("chosen") && line.contains("tiny-Q8_0.gguf");
    assert!(first.iter().any(|line| says(&line)), "{first:?}");
    assert_eq!(hub.asked().len(), 3);
    let second = lines("http://127.0.0.1:1", &cache);
    assert!(
        second.last().unwrap().starts_with("listening"),
        "{second:?}"
    );
    std::fs::remove_dir_all(&cache).unwrap();
}

#[test]
fn a_start_without_its_model_is_one_line_and_exit_code_1() {
    let hub = Hub::with_files(&[("a.gguf", b"1"), ("b.gguf", b"2")]);
    let cache = cache("fail");
    let complaint = |address: &str| {
        let output = command(address, &cache).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        text.lines().last().unwrap().to_owned()
    };
    let text = complaint(&hub.address);
    assert!(
        text.starts_with("rootstock: --model hf:an-org/a.model: "),
        "{text}"
    );
    assert!(text.contains("a.gguf, b.gguf"), "{text}");
    hub.change(|settings| settings.token = Some("secret".to_owned()));
    let text = complaint(&hub.address);
    assert!(text.contains("401") && text.contains("HF_TOKEN"), "{text}");
    let text = complaint("http://127.0.0.1:1");
    assert!(text.contains("cannot be reached"), "{text}");
    std::fs::remove_dir_all(&cache).ok();
}
