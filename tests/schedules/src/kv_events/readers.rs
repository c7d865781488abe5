//! Writers and readers of the ring: who reads in order misses nothing that is kept, wakes for each
//! message, and a full account is begun at its first message.

use shuttle::sync::Arc;
use shuttle::{future, thread};

use super::ring::Ring;
use super::sync::Mutex;
use crate::{is_found, under_all_schedules};

const MESSAGES: u8 = 4;
/// Bytes of three messages of one byte, with what each costs beside.
const ROOM: usize = 3 * 65;

/// A reader that sleeps until there is something new: it hears the last message, and what it hears
/// is in order.
fn one_writer_and_readers() {
    let ring = Arc::new(Ring::new(0, ROOM));
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                let (mut watch, mut next) = (ring.watch(), 0);
                while next < u64::from(MESSAGES) {
                    match ring.read(next) {
                        Some((number, message)) => {
                            assert!(number >= next && u64::from(message[0]) == number);
                            next = number + 1;
                        }
                        None => assert!(future::block_on(watch.changed()).is_ok()),
                    }
                }
            })
        })
        .collect();
    for byte in 0..MESSAGES {
        ring.push(vec![byte]);
    }
    for reader in readers {
        assert!(reader.join().is_ok());
    }
}

/// A test of `tests/all.rs`.
pub fn readers_hear_the_last_message_and_all_in_order() {
    under_all_schedules(one_writer_and_readers);
}

const WHOLE: u8 = 100;

/// While others write, an account is told, and the oldest go: the ring says that it tells
/// everything for as long as the account is kept, and no longer.
fn account_among_changes() {
    let ring = Arc::new(Ring::new(0, 65));
    let other = Arc::clone(&ring);
    let writer = thread::spawn(move || {
        other.push(vec![1]);
        other.push(vec![2]);
    });
    ring.push_whole(vec![vec![WHOLE], vec![WHOLE + 1]]);
    assert!(writer.join().is_ok());
    let kept: Vec<u8> = (ring.state().first..ring.state().next)
        .filter_map(|number| Some(ring.read(number)?.1[0]))
        .collect();
    let begin = kept.iter().position(|byte| *byte == WHOLE);
    assert_eq!(ring.tells_all_from(0), begin.is_some(), "{kept:?}");
    if let Some(at) = begin {
        assert_eq!(
            kept.get(at + 1),
            Some(&(WHOLE + 1)),
            "told in one: {kept:?}"
        );
    }
}

/// A test of `tests/all.rs`.
pub fn an_account_is_told_in_one_whoever_else_writes() {
    under_all_schedules(account_among_changes);
}

/// As the ring once was: the place of the account is noted under one lock, and the account
/// written under the next.
fn place_and_account_apart() {
    let ring = Arc::new(Mutex::new((0_usize, Vec::new())));
    let other = Arc::clone(&ring);
    let writer = thread::spawn(move || {
        if let Ok(mut ring) = other.lock() {
            ring.1.push(1);
        }
    });
    if let Ok(mut ring) = ring.lock() {
        ring.0 = ring.1.len();
    }
    if let Ok(mut ring) = ring.lock() {
        ring.1.push(WHOLE);
    }
    assert!(writer.join().is_ok());
    if let Ok(ring) = ring.lock() {
        assert_eq!(ring.1[ring.0], WHOLE);
    }
}

/// A test of `tests/all.rs`.
pub fn a_place_noted_before_its_account_would_be_another_messages() {
    is_found(place_and_account_apart);
}

/// A reader that takes its watch after its look, and so may sleep over a message.
fn watch_after_look() {
    let ring = Arc::new(Ring::new(0, ROOM));
    let reading = Arc::clone(&ring);
    let reader = thread::spawn(move || {
        while reading.read(0).is_none() {
            // The channel of the watch is tokio's: shuttle switches only where it is told to.
            thread::yield_now();
            let mut watch = reading.watch();
            assert!(future::block_on(watch.changed()).is_ok());
        }
    });
    ring.push(vec![0]);
    assert!(reader.join().is_ok());
}

/// A test of `tests/all.rs`.
pub fn a_watch_taken_after_the_look_would_sleep_over_a_message() {
    is_found(watch_after_look);
}
