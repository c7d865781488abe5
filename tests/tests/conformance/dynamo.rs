//! Dynamo's standalone indexer as a process of its own, and a client for its HTTP routes.
//!
//! It comes with the Python package `ai-dynamo-runtime`; `ROOTSTOCK_DYNAMO_PYTHON` names a Python
//! that has it (`.ci/run` makes one). It listens on all addresses of the machine.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

/// Model of all registrations.
const MODEL: &str = "m";
const INSTANCE: u64 = 1;
/// Looks whether it answers, 50 ms apart.
const TRIES: usize = 1200;
const MAIN: &str = "import sys\nfrom dynamo._core import run_kv_indexer\n\
                    run_kv_indexer(sys.argv[1:])";

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A running indexer.
#[derive(Debug)]
pub(crate) struct Indexer {
    address: SocketAddr,
    process: Child,
}

/// What it says about a prompt, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overlap {
    /// On the device of the rank asked for.
    pub(crate) device: u64,
    /// On any tier.
    pub(crate) longest: u64,
}

/// The Python that has Dynamo's runtime, pyzmq and msgpack.
pub(crate) fn python() -> Option<String> {
    let python = std::env::var("ROOTSTOCK_DYNAMO_PYTHON").ok();
    if python.is_none() {
        println!("skipped: ROOTSTOCK_DYNAMO_PYTHON names no Python with ai-dynamo-runtime");
    }
    python
}

impl Indexer {
    /// Starts one and waits until it answers; `None` when the machine has none.
    pub(crate) fn start(page_tokens: u32) -> Option<Indexer> {
        let python = python()?;
        let any = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = any.local_addr().unwrap().port();
        drop(any);
        let process = Command::new(python)
            .args(["-c", MAIN, "--model-name", MODEL, "--threads", "2"])
            .args([
                "--port",
                &port.to_string(),
                "--block-size",
                &page_tokens.to_string(),
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let indexer = Indexer {
            address: SocketAddr::from(([127, 0, 0, 1], port)),
            process,
        };
        for _ in 0..TRIES {
            if indexer.call("GET", "/health", &Value::Null).is_ok() {
                return Some(indexer);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("the indexer does not answer");
    }

    /// Has it listen to a publisher.
    pub(crate) fn register(&self, events: SocketAddr, replay: SocketAddr, page_tokens: u32) {
        let body = json!({
            "instance_id": INSTANCE, "endpoint": format!("tcp://{events}"), "model_name": MODEL,
            "block_size": page_tokens, "replay_endpoint": format!("tcp://{replay}"),
        });
        self.call("POST", "/register", &body).unwrap();
    }

    /// Asks for a prompt.
    pub(crate) fn query(
        &self,
        tokens: &[u32],
        (salt, lora): (Option<&str>, Option<&str>),
        rank: u16,
    ) -> Overlap {
        let mut body = json!({"token_ids": tokens, "model_name": MODEL});
        if let Some(salt) = salt {
            body["cache_salt"] = salt.into();
        }
        if let Some(lora) = lora {
            body["lora_name"] = lora.into();
        }
        let answer = self.call("POST", "/query", &body).unwrap();
        let (instance, rank) = (INSTANCE.to_string(), rank.to_string());
        let device = answer["scores"][&instance][&rank].as_u64();
        let longest = answer["instances"][&instance]["longest_matched"].as_u64();
        Overlap {
            device: device.unwrap_or(0),
            longest: longest.unwrap_or(0),
        }
    }

    fn call(&self, method: &str, path: &str, body: &Value) -> Result<Value> {
        let body = body.to_string();
        let mut socket = TcpStream::connect(self.address)?;
        socket.set_read_timeout(Some(Duration::from_secs(20)))?;
        write!(
            socket,
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut text = String::new();
        socket.read_to_string(&mut text)?;
        let (head, rest) = text.split_once("\r\n\r\n").ok_or("no answer")?;
        let status = head.split(' ').nth(1).unwrap_or_default();
        if !status.starts_with('2') {
            return Err(format!("{method} {path}: {text}").into());
        }
        // A chunked answer has its JSON between the first and the last brace.
        match (rest.find('{'), rest.rfind('}')) {
            (Some(from), Some(to)) => Ok(serde_json::from_str(&rest[from..=to])?),
            _ => Ok(Value::Null),
        }
    }
}

impl Drop for Indexer {
    fn drop(&mut self) {
        // Ours alone; it may have ended already.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}
