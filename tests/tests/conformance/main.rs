//! After thousands of random operations, with messages lost on the way, Dynamo's indexer knows
//! what our tree knows: on the device and on host, for each salt and adapter.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    reason = "tests stop at the first surprise and say what they skipped; sizes are tiny"
)]

mod dynamo;
mod proxy;
mod world;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use dynamo::{Indexer, Overlap};
use proxy::Proxy;
use rootstock_server::kv_events::publisher::{Publisher, Settings};
use serde_json::Value;
use world::{NAMES, PAGE_TOKENS, World};

const OPS: u64 = 5_000;
const PROMPTS: usize = 300;
/// Looks whether the indexer has caught up, 200 ms apart.
const TRIES: usize = 300;

async fn publisher(ranks: u16, buffer_bytes: usize) -> Publisher {
    let any = || "tcp://127.0.0.1:0".parse().unwrap();
    Publisher::bind(Settings {
        events: any(),
        replay: Some(any()),
        topic: String::new(),
        buffer_bytes,
        ranks,
        unix_seconds: || 1.8e9,
    })
    .await
    .unwrap()
}

/// Waits until the indexer says of all prompts what the tree says; panics with the differences
/// when it does not come to that.
async fn agree(indexer: &Indexer, world: &mut World, replicas: u16) -> u64 {
    let prompts: Vec<_> = (0..PROMPTS)
        .map(|at| (at % NAMES.len(), at as u16 % replicas, world.prompt()))
        .collect();
    let mut tries = 0..TRIES;
    loop {
        world.tell();
        let mut found = 0;
        let mut wrong = Vec::new();
        for (name, rank, tokens) in &prompts {
            let probe = world.probe(*name, tokens, *rank);
            let ours = Overlap {
                device: probe.device_tokens.into(),
                longest: (probe.device_tokens + probe.host_tokens).into(),
            };
            let mut theirs = indexer.query(tokens, NAMES[*name], *rank);
            if replicas > 1 {
                // The longest match is told over all ranks together.
                theirs.longest = ours.longest;
            }
            found += u64::from(ours.longest > 0);
            if ours != theirs {
                wrong.push((name, rank, ours, theirs));
            }
        }
        if wrong.is_empty() {
            return found;
        }
        assert!(
            tries.next().is_some(),
            "{} of {PROMPTS} prompts differ: {:?}",
            wrong.len(),
            &wrong[..wrong.len().min(8)]
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// A subscriber that shakes hands, subscribes, and never reads again.
fn silent_subscriber(events: SocketAddr) -> TcpStream {
    let mut socket = TcpStream::connect(events).unwrap();
    let mut greeting = [0_u8; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    socket.write_all(&greeting).unwrap();
    socket
        .write_all(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB")
        .unwrap();
    socket.write_all(&[0, 1, 1]).unwrap();
    socket.read_exact(&mut greeting).unwrap();
    socket
}

/// Resident bytes of this process.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_indexer_of_dynamo_agrees_with_our_tree_although_the_connection_was_cut() {
    let publisher = publisher(1, 64 << 20).await;
    let proxy = Proxy::to(publisher.events_address()).await.unwrap();
    let Some(indexer) = Indexer::start(PAGE_TOKENS) else {
        return;
    };
    let replay = publisher.replay_address().unwrap();
    indexer.register(proxy.address, replay, PAGE_TOKENS);
    let _silent = silent_subscriber(publisher.events_address());
    let mut world = World::new(1, 1, &publisher);
    for op in 0..OPS {
        match op {
            1_500 | 3_500 => proxy.cut(),
            2_000 | 4_000 => proxy.mend(),
            _ => {}
        }
        world.step();
        if op % 50 == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let found = agree(&indexer, &mut world, 1).await;
    let state = publisher.state();
    println!(
        "{OPS} operations, events told {:?}: {PROMPTS} prompts equal, {found} of them cached; \
         {state:?}",
        world.told
    );
    assert!(
        found > 50,
        "{found} prompts with something cached show little"
    );
    assert!(
        world.told.iter().all(|&count| count > 0),
        "{:?}",
        world.told
    );
    assert!(
        state.replays >= 2,
        "a cut connection asks for what it missed: {state:?}"
    );
    assert_eq!(state.accounts, 1, "nothing was overwritten: {state:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_is_overwritten_before_it_is_read_is_told_again_from_the_start() {
    let publisher = publisher(2, 16 << 10).await;
    let proxy = Proxy::to(publisher.events_address()).await.unwrap();
    let Some(indexer) = Indexer::start(PAGE_TOKENS) else {
        return;
    };
    let mut world = World::new(2, 2, &publisher);
    // A flush would tell everything from the start as well.
    world.flushes = false;
    for _ in 0..2_000 {
        world.step();
    }
    // A late subscriber: the beginning is gone from the buffer.
    let replay = publisher.replay_address().unwrap();
    indexer.register(proxy.address, replay, PAGE_TOKENS);
    let found = agree(&indexer, &mut world, 2).await;
    let late = publisher.state();
    assert!(late.accounts >= 2, "{late:?}");
    proxy.cut();
    for _ in 0..OPS {
        world.step();
    }
    proxy.mend();
    let again = agree(&indexer, &mut world, 2).await;
    let state = publisher.state();
    println!("two ranks: {found} and {again} of {PROMPTS} cached prompts equal; {state:?}");
    assert!(state.accounts > late.accounts, "{state:?}");
    assert!(found > 50 && again > 50, "{found}, {again}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn silent_subscribers_cost_nothing_beyond_the_buffer() {
    const BUFFER: usize = 4 << 20;
    let publisher = publisher(1, BUFFER).await;
    let silent: Vec<_> = (0..8)
        .map(|_| silent_subscriber(publisher.events_address()))
        .collect();
    let mut world = World::new(3, 1, &publisher);
    let fill = |world: &mut World, messages: u64| {
        let from = publisher.state().ring.next;
        while publisher.state().ring.next < from + messages {
            world.step();
        }
    };
    fill(&mut world, 40_000);
    let before = resident_bytes();
    fill(&mut world, 200_000);
    let grown = resident_bytes().saturating_sub(before);
    let state = publisher.state();
    println!(
        "8 silent subscribers, 200000 messages: {grown} bytes more resident, {} kept",
        state.ring.bytes
    );
    assert!(state.ring.bytes <= BUFFER + 4096, "{state:?}");
    assert!(grown < 32 << 20, "{grown} bytes");
    drop(silent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscriber_in_python_reads_every_message_and_gets_the_same_ones_again() {
    let Some(python) = dynamo::python() else {
        return;
    };
    const MESSAGES: u64 = 2_000;
    let publisher = publisher(2, 64 << 20).await;
    let (events, replay) = (
        publisher.events_address(),
        publisher.replay_address().unwrap(),
    );
    let mut process = Command::new(python)
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/conformance/subscriber.py"
        ))
        .args([
            format!("tcp://{events}"),
            format!("tcp://{replay}"),
            MESSAGES.to_string(),
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut world = World::new(4, 2, &publisher);
    while publisher.state().subscribers == 0 {
        assert!(
            process.try_wait().unwrap().is_none(),
            "the subscriber ended early"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let until = publisher.state().ring.next + 2 * MESSAGES;
    while publisher.state().ring.next < until {
        world.step();
    }
    let output = process.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    println!("pyzmq: {report}");
    for promise in ["end", "contiguous", "same"] {
        assert_eq!(report[promise], true, "{report}");
    }
    for kind in ["BlockStored", "BlockRemoved"] {
        assert!(report["kinds"][kind].as_u64().unwrap() > 0, "{report}");
    }
}
