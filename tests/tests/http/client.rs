//! A small HTTP client over a plain socket: what is sent and what comes back is seen byte by
//! byte, and the connection can be cut at any moment.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Far beyond anything a healthy server needs; only a hang reaches it.
const HANG: Duration = Duration::from_secs(120);

/// One answer.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Answer {
    /// The value of a header.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(found, _)| found == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The body as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no JSON: {}", self.body))
    }

    /// The JSON payloads of an event stream, without the closing `[DONE]`.
    pub(crate) fn events(&self) -> Vec<Value> {
        let data = data_lines(&self.body);
        let events = data.iter().filter(|line| **line != "[DONE]");
        events
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// Names and payloads of an event stream that names its events.
    pub(crate) fn named_events(&self) -> Vec<(String, Value)> {
        let blocks = self.body.split("\n\n").filter(|block| !block.is_empty());
        let read = |block: &str| {
            let (name, data) = block.split_once('\n').unwrap();
            let name = name.strip_prefix("event: ").unwrap();
            let data = data.strip_prefix("data: ").unwrap();
            (name.to_owned(), serde_json::from_str(data).unwrap())
        };
        blocks.map(read).collect()
    }

    /// True when the stream ended with `[DONE]`.
    pub(crate) fn is_done(&self) -> bool {
        data_lines(&self.body).last() == Some(&"[DONE]")
    }

    /// The text of one choice, put together from a stream.
    pub(crate) fn streamed_text(&self, choice: u64) -> String {
        let events = self.events();
        let choices = events
            .iter()
            .flat_map(|event| event["choices"].as_array().unwrap());
        choices
            .filter(|found| found["index"] == choice)
            .filter_map(|found| {
                found["text"]
                    .as_str()
                    .or(found["delta"]["content"].as_str())
            })
            .collect()
    }

    /// The finish reasons of one choice in a stream.
    pub(crate) fn finish_reasons(&self, choice: u64) -> Vec<String> {
        let events = self.events();
        let choices = events
            .iter()
            .flat_map(|event| event["choices"].as_array().unwrap());
        choices
            .filter(|found| found["index"] == choice)
            .filter_map(|found| found["finish_reason"].as_str().map(str::to_owned))
            .collect()
    }
}

fn data_lines(body: &str) -> Vec<&str> {
    body.lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .collect()
}

/// Sends one request on its own connection and reads the answer to its end.
pub(crate) fn send(address: SocketAddr, method: &str, path: &str, body: &str) -> Answer {
    send_with(address, method, path, &[], body)
}

/// [`send`] with headers.
pub(crate) fn send_with(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Answer {
    let mut open = Open::start(address);
    open.request(method, path, headers, body);
    open.answer()
}

/// Posts JSON.
pub(crate) fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    send(address, "POST", path, &body.to_string())
}

/// Gets a path.
pub(crate) fn get(address: SocketAddr, path: &str) -> Answer {
    send(address, "GET", path, "")
}

/// An open connection.
#[derive(Debug)]
pub(crate) struct Open {
    reader: BufReader<TcpStream>,
}

impl Open {
    /// Connects.
    pub(crate) fn start(address: SocketAddr) -> Open {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(HANG)).unwrap();
        Open {
            reader: BufReader::new(socket),
        }
    }

    /// Sends bytes as they are.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.reader.get_mut().write_all(bytes).unwrap();
    }

    /// Sends a request.
    pub(crate) fn request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !body.is_empty() {
            head.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        self.raw(head.as_bytes());
        self.raw(body.as_bytes());
    }

    /// Posts JSON.
    pub(crate) fn post(&mut self, path: &str, body: &Value) {
        self.request("POST", path, &[], &body.to_string());
    }

    /// Sends bytes that the server may refuse half-way, and reads the status; none when it only
    /// closed the connection.
    pub(crate) fn raw_until_refused(&mut self, bytes: &[u8]) -> Option<u16> {
        if self.reader.get_mut().write_all(bytes).is_err() {
            return None;
        }
        let mut line = String::new();
        self.reader.read_line(&mut line).ok()?;
        line.split(' ').nth(1)?.parse().ok()
    }

    /// Reads status and headers.
    pub(crate) fn head(&mut self) -> (u16, Vec<(String, String)>) {
        let status_line = self.line();
        let status = status_line.split(' ').nth(1).unwrap_or_default();
        let status = status
            .parse()
            .unwrap_or_else(|_| panic!("no status: {status_line:?}"));
        let mut headers = Vec::new();
        loop {
            let line = self.line();
            let Some((name, value)) = line.split_once(':') else {
                break;
            };
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        (status, headers)
    }

    /// Reads a whole answer.
    pub(crate) fn answer(&mut self) -> Answer {
        let (status, headers) = self.head();
        let find = |name: &str| headers.iter().find(|(found, _)| found == name);
        let mut body = Vec::new();
        if find("transfer-encoding").is_some() {
            while let Some(chunk) = self.chunk() {
                body.extend(chunk);
            }
        } else if let Some((_, length)) = find("content-length") {
            body = vec![0; length.parse().unwrap()];
            self.reader.read_exact(&mut body).unwrap();
        }
        Answer {
            status,
            headers,
            body: String::from_utf8(body).unwrap(),
        }
    }

    /// Reads one chunk of a chunked body; `None` after the last.
    pub(crate) fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = usize::from_str_radix(&self.line(), 16).expect("a chunk size");
        let mut chunk = vec![0; size];
        self.reader.read_exact(&mut chunk).unwrap();
        assert_eq!(self.line(), "");
        (size > 0).then_some(chunk)
    }

    /// True when the server closes the connection without a further byte.
    pub(crate) fn is_closed(&mut self) -> bool {
        match self.reader.read(&mut [0]) {
            Ok(read) => read == 0,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }

    /// Ends our sending side; the server cannot tell this from a vanished client.
    pub(crate) fn half_close(&self) {
        self.reader.get_ref().shutdown(Shutdown::Write).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        line.trim_end_matches(['\r', '\n']).to_owned()
    }
}
