//! Peers of the KV event publisher that send any bytes, as subscriber or to the replay socket:
//! they are heard or cut off, and the next peer is served.
//!
//! `cargo +nightly fuzz run kv_events -- -max_total_time=60`, in `tests/`.
#![no_main]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::OnceLock;
use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use rootstock_server::kv_events::publisher::{Publisher, Settings};

#[derive(Arbitrary, Debug)]
struct Input {
    replay: bool,
    /// Whether a whole greeting goes before the rest, as of which kind of socket.
    greeting: Option<bool>,
    rest: Vec<u8>,
}

/// ZMTP 3.1, mechanism NULL.
fn greeting() -> Vec<u8> {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1];
    bytes.extend_from_slice(b"NULL");
    bytes.resize(64, 0);
    bytes
}

fn ready(kind: &str) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type".to_vec();
    body.extend_from_slice(&u32::try_from(kind.len()).unwrap().to_be_bytes());
    body.extend_from_slice(kind.as_bytes());
    let mut frame = vec![4, u8::try_from(body.len()).unwrap()];
    frame.extend_from_slice(&body);
    frame
}

fn addresses() -> &'static [SocketAddr; 2] {
    static BOUND: OnceLock<[SocketAddr; 2]> = OnceLock::new();
    BOUND.get_or_init(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let any = || "tcp://127.0.0.1:0".parse().unwrap();
        let publisher = runtime
            .block_on(Publisher::bind(Settings {
                events: any(),
                replay: Some(any()),
                topic: "t".to_owned(),
                buffer_bytes: 1 << 20,
                ranks: 1,
                unix_seconds: || 1.8e9,
            }))
            .unwrap();
        let addresses = [
            publisher.events_address(),
            publisher.replay_address().unwrap(),
        ];
        // Both live as long as the process.
        std::mem::forget(publisher);
        std::mem::forget(runtime);
        addresses
    })
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream
}

fuzz_target!(|input: Input| {
    let address = addresses()[usize::from(input.replay)];
    let mut peer = connect(address);
    let mut sent = Vec::new();
    if let Some(subscriber) = input.greeting {
        sent.extend(greeting());
        sent.extend(ready(if subscriber { "SUB" } else { "DEALER" }));
    }
    sent.extend(&input.rest);
    // A peer that is cut off early cannot send all of it.
    let _ = peer.write_all(&sent);
    let _ = peer.shutdown(Shutdown::Write);
    let mut sink = [0; 4096];
    while matches!(peer.read(&mut sink), Ok(read) if read > 0) {}
    let mut next = connect(address);
    next.write_all(&greeting()).unwrap();
    let mut answer = [0; 10];
    next.read_exact(&mut answer)
        .expect("the next peer is greeted");
    assert_eq!((answer[0], answer[9]), (0xff, 0x7f));
});
