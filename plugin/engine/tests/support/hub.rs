//! A hub on this machine: the listing of one repository, the redirect to a second server, and the
//! bytes there, by ranges; with the faults that a test asks for, and a list of what was asked.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![expect(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::let_underscore_must_use,
    reason = "shared by test binaries; a client may be gone before its answer"
)]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use sha2::{Digest, Sha256};

/// The repository that a hub here has.
pub const REPOSITORY: &str = "an-org/a.model";
/// The commit that it is at.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What a hub is to do.
#[derive(Clone, Default)]
pub struct Settings {
    /// Names and contents.
    pub files: Vec<(String, Vec<u8>)>,
    /// The token that it wants.
    pub token: Option<String>,
    /// The status of its first listings, in this order.
    pub busy: Vec<u16>,
    /// The status of all that its second server is asked for.
    pub refuse: Option<u16>,
    /// Bytes after which each answer with contents ends.
    pub cut: Option<usize>,
    /// It sends other bytes than it lists.
    pub rotten: bool,
    /// Bytes that it sends more than it lists.
    pub longer: usize,
    /// It answers each request for a part with all.
    pub no_ranges: bool,
    /// It lists names alone, and tells size and digest in the redirect, or not at all.
    pub bare_listing: bool,
    pub no_etag: bool,
}

/// One request that came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
}

/// A hub that runs until the test ends.
pub struct Hub {
    pub address: String,
    pub settings: Arc<Mutex<Settings>>,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Hub {
    pub fn start(settings: Settings) -> Hub {
        let hub = Hub {
            address: String::new(),
            settings: Arc::new(Mutex::new(settings)),
            asked: Arc::default(),
        };
        let store = hub.listen(|server, asked, socket| server.contents(asked, socket));
        let address = hub.listen(move |server, asked, socket| {
            server.routes(asked, &store, socket);
        });
        Hub { address, ..hub }
    }

    /// With these files, and no faults.
    pub fn with_files(files: &[(&str, &[u8])]) -> Hub {
        let files = files
            .iter()
            .map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec()));
        Hub::start(Settings {
            files: files.collect(),
            ..Settings::default()
        })
    }

    pub fn change(&self, change: impl FnOnce(&mut Settings)) {
        change(&mut self.settings.lock().unwrap());
    }

    /// What came since this was asked for the last time.
    pub fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }

    fn listen(
        &self,
        answer: impl Fn(&Server, &Asked, &mut TcpStream) + Send + Sync + 'static,
    ) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (settings, all) = (Arc::clone(&self.settings), Arc::clone(&self.asked));
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                let mut socket = socket.unwrap();
                if let Some(asked) = read(&socket) {
                    all.lock().unwrap().push(asked.clone());
                    let server = Server(settings.lock().unwrap().clone());
                    if !server.0.busy.is_empty() && asked.path.starts_with("/api/") {
                        settings.lock().unwrap().busy.remove(0);
                    }
                    answer(&server, &asked, &mut socket);
                }
            }
        });
        address
    }
}

/// A request's head.
fn read(socket: &TcpStream) -> Option<Asked> {
    let mut lines = BufReader::new(socket).lines();
    let first = lines.next()?.ok()?;
    let mut asked = Asked {
        path: first.split(' ').nth(1)?.to_owned(),
        range: None,
        token: None,
    };
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(": ") else {
            break;
        };
        match name.to_ascii_lowercase().as_str() {
            "range" => asked.range = Some(value.to_owned()),
            "authorization" => asked.token = Some(value.to_owned()),
            _ => {}
        }
    }
    Some(asked)
}

struct Server(Settings);

impl Server {
    fn routes(&self, asked: &Asked, store: &str, socket: &mut TcpStream) {
        let wanted = self.0.token.as_ref().map(|token| format!("Bearer {token}"));
        if wanted.is_some() && wanted != asked.token {
            return send(socket, 401, "", b"");
        }
        let listing = format!("/api/models/{REPOSITORY}/revision/main?blobs=true");
        let resolve = format!("/{REPOSITORY}/resolve/{COMMIT}/");
        if asked.path == listing {
            match self.0.busy.first() {
                Some(status) => send(socket, *status, "", b""),
                None => send(socket, 200, "", self.listing().as_bytes()),
            }
        } else if let Some(name) = asked.path.strip_prefix(&resolve) {
            let Some((_, bytes)) = self.0.files.iter().find(|(file, _)| file == name) else {
                return send(socket, 404, "", b"");
            };
            let mut head = format!(
                "location: {store}/{name}\r\nx-linked-size: {}\r\n",
                bytes.len()
            );
            if !self.0.no_etag {
                head += &format!("x-linked-etag: \"{}\"\r\n", sha256(bytes));
            }
            send(socket, 302, &head, b"");
        } else {
            send(socket, 404, "", b"");
        }
    }

    fn listing(&self) -> String {
        let file = |(name, bytes): &(String, Vec<u8>)| {
            let (size, sha256) = (bytes.len(), sha256(bytes));
            if self.0.bare_listing {
                return format!("{{\"rfilename\":{name:?}}}");
            }
            format!(
                "{{\"rfilename\":{name:?},\"size\":{size},\
                 \"lfs\":{{\"sha256\":\"{sha256}\",\"size\":{size},\"pointerSize\":1}}}}"
            )
        };
        let files: Vec<String> = self.0.files.iter().map(file).collect();
        format!(
            "{{\"sha\":\"{COMMIT}\",\"siblings\":[{}]}}",
            files.join(",")
        )
    }

    fn contents(&self, asked: &Asked, socket: &mut TcpStream) {
        if let Some(status) = self.0.refuse {
            return send(socket, status, "", b"");
        }
        let name = asked.path.trim_start_matches('/');
        let (_, bytes) = self.0.files.iter().find(|(file, _)| file == name).unwrap();
        let mut bytes = bytes.clone();
        if self.0.rotten {
            bytes.reverse();
        }
        bytes.resize(bytes.len() + self.0.longer, b'x');
        let all = bytes.len();
        let from = asked.range.as_deref().and_then(|range| {
            let range = range.strip_prefix("bytes=")?.strip_suffix('-')?;
            range.parse::<usize>().ok()
        });
        let (status, head, from) = match from {
            Some(from) if !self.0.no_ranges && from >= all => (416, String::new(), all),
            Some(from) if !self.0.no_ranges => {
                let range = format!("content-range: bytes {from}-{}/{all}\r\n", all - 1);
                (206, range, from)
            }
            _ => (200, String::new(), 0),
        };
        let rest = &bytes[from..];
        let head = format!(
            "HTTP/1.1 {status} x\r\n{head}content-length: {}\r\nconnection: close\r\n\r\n",
            rest.len()
        );
        let cut = self.0.cut.unwrap_or(usize::MAX).min(rest.len());
        let _ = socket.write_all(head.as_bytes());
        let _ = socket.write_all(&rest[..cut]);
    }
}

fn send(socket: &mut TcpStream, status: u16, head: &str, body: &[u8]) {
    let head = format!(
        "HTTP/1.1 {status} x\r\n{head}content-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let _ = socket.write_all(head.as_bytes());
    let _ = socket.write_all(body);
}

pub fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
