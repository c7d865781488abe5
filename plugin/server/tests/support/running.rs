//! The binary as a process: started on a tiny model and a free port, asked over a plain socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};

#[path = "../../../../tests/tests/http/tiny_model.rs"]
#[expect(dead_code, reason = "shared with the HTTP tests, which use all of it")]
mod tiny_model;

use tiny_model::TinyModel;

pub(crate) fn tiny_model() -> TinyModel {
    TinyModel::with_weights()
}

pub(crate) fn rootstock(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rootstock"));
    command
        .args(arguments)
        .env_clear()
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A running server and the lines it wrote until it listened.
pub(crate) struct Running {
    pub(crate) child: Child,
    pub(crate) stderr: BufReader<ChildStderr>,
    pub(crate) lines: Vec<String>,
    pub(crate) address: String,
    pub(crate) _model: TinyModel,
}

impl Running {
    pub(crate) fn start(arguments: &[&str]) -> Running {
        Running::start_in(&[], &[&["--kv-cache-mib", "4"], arguments].concat())
    }

    /// The same with variables of the environment, and a cache as the arguments say.
    pub(crate) fn start_in(environment: &[(&str, &str)], arguments: &[&str]) -> Running {
        let model = TinyModel::with_weights();
        let path = model.path.to_str().unwrap().to_owned();
        let fixed = ["--model", &path, "--port", "0", "--threads", "1"];
        #[expect(
            clippy::zombie_processes,
            reason = "a panic ends the test and its children"
        )]
        let mut child = rootstock(&[&fixed[..], arguments].concat())
            .envs(environment.iter().copied())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            assert!(
                stderr.read_line(&mut line).unwrap() > 0,
                "ended early: {lines:?}"
            );
            lines.push(line.trim_end().to_owned());
            if let Some(url) = line.strip_prefix("listening") {
                let address = url
                    .trim()
                    .trim_start_matches("http://")
                    .trim_end_matches("/v1");
                let address = address.to_owned();
                return Running {
                    child,
                    stderr,
                    lines,
                    address,
                    _model: model,
                };
            }
        }
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args([name, &pid]).status().unwrap();
        assert!(status.success());
    }

    /// Sends a request and leaves the answer to be read.
    pub(crate) fn request(&self, path: &str, body: &str) -> BufReader<TcpStream> {
        self.try_request(path, body).unwrap()
    }

    /// The same, for a server that may be gone.
    pub(crate) fn try_request(
        &self,
        path: &str,
        body: &str,
    ) -> std::io::Result<BufReader<TcpStream>> {
        let mut socket = TcpStream::connect(&self.address)?;
        let length = body.len();
        let head = format!("POST {path} HTTP/1.1\r\nhost: t\r\ncontent-length: {length}\r\n");
        socket.write_all(head.as_bytes())?;
        socket.write_all(b"connection: close\r\n\r\n")?;
        socket.write_all(body.as_bytes())?;
        Ok(BufReader::new(socket))
    }

    /// Asks for a path and leaves the answer to be read.
    pub(crate) fn get(&self, path: &str) -> BufReader<TcpStream> {
        let mut socket = TcpStream::connect(&self.address).unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n");
        socket.write_all(head.as_bytes()).unwrap();
        BufReader::new(socket)
    }

    /// Waits for the end; the exit status.
    pub(crate) fn wait(mut self) -> Option<i32> {
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).unwrap();
        assert!(!rest.contains("panicked"), "{rest}");
        self.child.wait().unwrap().code()
    }
}
