//! The storage tier on a real Redis: two servers share what one computed. The program
//! `redis-server` is started here; without it the tests are skipped.
#![cfg(unix)]
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests stop at the first surprise and say what they skipped"
)]

#[path = "support/running.rs"]
#[expect(dead_code, reason = "shared with the other tests of the binary")]
mod running;
#[path = "support/stored.rs"]
#[expect(dead_code, reason = "shared with the tests over a folder")]
mod stored;

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use running::Running;
use stored::{PAGES, WHOLE, ask, folder, start, store, until};

/// A Redis of this test's own, on a free port, that keeps nothing.
struct Redis {
    child: Child,
    port: u16,
    folder: PathBuf,
}

impl Redis {
    /// `None` without the program.
    fn start(name: &str) -> Option<Redis> {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let folder = folder(name);
        std::fs::create_dir_all(&folder).unwrap();
        let started = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no", "--requirepass", "pa ss"])
            .arg("--dir")
            .arg(&folder)
            .stdout(Stdio::null())
            .spawn();
        let child = match started {
            Ok(child) => child,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                println!("skipped: no redis-server (Debian package redis-server)");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let redis = Redis {
            child,
            port,
            folder,
        };
        for _ in 0..30_000 {
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Some(redis);
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
        panic!("redis-server does not listen");
    }

    fn address(&self, database: u8) -> String {
        format!("redis://:pa%20ss@127.0.0.1:{}/{database}", self.port)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        drop(std::fs::remove_dir_all(&self.folder));
    }
}

fn stop(server: Running) {
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn two_servers_share_a_prefix_that_one_computed() {
    let Some(redis) = Redis::start("redis-shared") else {
        return;
    };
    let uri = redis.address(0);
    let (first, second) = (start(&uri, &[]), start(&uri, &[]));
    let apart = start(&redis.address(1), &[]);
    let shown = first.lines.join("\n");
    assert!(
        shown.contains("redis://127.0.0.1") && !shown.contains("pa%20ss"),
        "{shown}"
    );
    let computed = ask(&first, 1);
    assert_eq!((computed.cached, computed.storage), (0, 0));
    until(&first, "written", PAGES);
    // Nobody told it: it looks, and then reads.
    let shared = ask(&second, 1);
    assert_eq!((shared.cached, shared.storage), (WHOLE, WHOLE));
    assert_eq!(shared.text, computed.text);
    assert_eq!(store(&second, "read"), PAGES);
    // A neighbor shares half of it, also where nobody has it in memory any more.
    let third = start(&uri, &[]);
    assert_eq!(ask(&third, 2).storage, WHOLE / 2);
    assert_eq!(ask(&apart, 1).storage, 0, "another database");
    for server in [first, second, third, apart] {
        stop(server);
    }
}

#[test]
fn a_redis_that_goes_away_costs_nothing_but_its_hits() {
    let Some(redis) = Redis::start("redis-gone") else {
        return;
    };
    let uri = redis.address(0);
    let server = start(&uri, &[]);
    let told = ask(&server, 1);
    until(&server, "written", PAGES);
    stop(server);
    let server = start(&uri, &[]);
    drop(redis);
    let again = ask(&server, 1);
    assert_eq!((again.storage, &again.text), (0, &told.text));
    assert!(store(&server, "errors") + store(&server, "timeouts") > 0);
    assert_eq!(ask(&server, 1).cached, WHOLE, "what it computed is its own");
    stop(server);
}
