//! Clients that cost a server its memory elsewhere: some read a byte now and then, a thousand say
//! nothing, one sends a hundred megabytes. The others are served meanwhile, and memory stays within
//! bounds.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

#[path = "support/running.rs"]
#[expect(dead_code, reason = "shared with tests that look at more of a server")]
mod running;

use running::Running;
use tokio::net::TcpSocket;

/// The most that the process has ever had in memory, in MiB.
fn peak_mib(server: &Running) -> u64 {
    let path = format!("/proc/{}/status", server.child.id());
    let status = std::fs::read_to_string(path).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.unwrap().trim().trim_end_matches(" kB");
    kib.trim().parse::<u64>().unwrap() / 1024
}

/// A request with a long stream, on a connection that takes in very little at a time.
fn slow_reader(address: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let socket = runtime.block_on(async {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        socket.connect(address).await.unwrap()
    });
    let mut socket = socket.into_std().unwrap();
    socket.set_nonblocking(false).unwrap();
    let body = "{\"prompt\": \"on and on\", \"max_tokens\": 3000, \"ignore_eos\": true, \
        \"stream\": true, \"logprobs\": 20}";
    let length = body.len();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: {length}");
    socket
        .write_all(format!("{head}\r\n\r\n{body}").as_bytes())
        .unwrap();
    socket
}

fn is_served(server: &Running) {
    let mut answer = String::new();
    let body = "{\"prompt\": \"quick\", \"max_tokens\": 2}";
    let mut asked = server.request("/v1/completions", body);
    asked.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// Sends a body of so many MiB in pieces, or as much of it as is taken.
fn send_huge(address: SocketAddr, mib: usize) {
    let mut socket = TcpStream::connect(address).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n";
    socket.write_all(head.as_bytes()).unwrap();
    let piece = format!("100000\r\n{}\r\n", " ".repeat(1 << 20));
    for _ in 0..mib {
        match socket.write_all(piece.as_bytes()) {
            Ok(()) => {}
            Err(error) => {
                let cut = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];
                assert!(cut.contains(&error.kind()), "{error}");
                return;
            }
        }
    }
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
}

#[test]
fn slow_readers_idle_connections_and_a_huge_body_leave_the_others_served_in_bounded_memory() {
    let server = Running::start(&[]);
    let address: SocketAddr = server.address.parse().unwrap();
    is_served(&server);
    let before = peak_mib(&server);
    let idle: Vec<TcpStream> = (0..1000)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    let mut slow: Vec<TcpStream> = (0..5).map(|_| slow_reader(address)).collect();
    let mut read = vec![0_usize; slow.len()];
    for round in 0..20 {
        for (socket, read) in slow.iter_mut().zip(&mut read) {
            let mut byte = [0];
            socket.read_exact(&mut byte).unwrap();
            *read += 1;
        }
        is_served(&server);
        if round == 10 {
            send_huge(address, 100);
        }
    }
    assert_eq!(read, [20; 5], "they are still connected");
    let grown = peak_mib(&server) - before;
    assert!(grown < 200, "{grown} MiB more than at rest");
    drop(slow);
    is_served(&server);
    drop(idle);
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
}
