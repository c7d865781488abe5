//! The storage tier through the binary: killed, started again, shared, and damaged.
#![cfg(unix)]
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests stop at the first surprise and say what they skipped"
)]

#[path = "support/running.rs"]
#[expect(dead_code, reason = "shared with the other tests of the binary")]
mod running;
#[path = "support/stored.rs"]
mod stored;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use running::Running;
use stored::{PAGES, WHOLE, address_of, ask, folder, start, store, try_ask, until};

fn files(folder: &Path) -> usize {
    let subs = std::fs::read_dir(folder.join("pages"))
        .into_iter()
        .flatten();
    let count = |sub: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_dir(sub.unwrap().path()).map_or(0, Iterator::count)
    };
    subs.map(count).sum()
}

/// Ends a server as a power cut would, while it writes pages.
fn kill_amid_writes(mut server: Running, folder: &Path, from: u64) {
    let before = files(folder);
    std::thread::scope(|scope| {
        let server = &server;
        scope.spawn(move || {
            // Until the server is gone.
            let all = (from..from + 100_000).map(|conversation| try_ask(server, conversation));
            all.take_while(Option::is_some).count()
        });
        for _ in 0..60_000 {
            if files(folder) >= before + 40 {
                server.signal("-KILL");
                return;
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
        panic!("nothing is written");
    });
    assert!(!server.child.wait().unwrap().success());
}

#[test]
fn after_kill_9_amid_writes_an_old_conversation_is_found_and_says_the_same() {
    let folder = folder("server-killed");
    let uri = address_of(&folder);
    let plain = Running::start(&[]);
    let texts: Vec<String> = (0..4)
        .map(|conversation| ask(&plain, conversation).text)
        .collect();
    plain.signal("-TERM");
    assert_eq!(plain.wait(), Some(0));
    let server = start(&uri, &[]);
    for (conversation, text) in (0..).zip(&texts) {
        assert_eq!(&ask(&server, conversation).text, text);
    }
    // Four conversations over one half.
    until(&server, "pages", PAGES / 2 + 4 * PAGES / 2);
    kill_amid_writes(server, &folder, 1000);
    for round in 1..4 {
        let server = start(&uri, &[]);
        for (conversation, text) in (0..).zip(&texts) {
            let told = ask(&server, conversation);
            assert_eq!(&told.text, text, "round {round}");
            // Later requests compute where the tiny model turned out to be quicker than a copy.
            let found = (told.cached, told.storage);
            if conversation == 0 {
                assert_eq!(found, (WHOLE, WHOLE), "round {round}");
            }
            assert!(told.cached >= WHOLE / 2, "round {round}: {found:?}");
        }
        let damaged =
            ["corrupt", "truncated", "foreign", "errors"].map(|name| store(&server, name));
        assert_eq!(damaged, [0; 4], "only whole pages are there");
        kill_amid_writes(server, &folder, 10_000 * round);
        let left = std::fs::read_dir(folder.join(".unfinished"))
            .unwrap()
            .count();
        assert!(left >= 1, "it was killed with its folder there");
    }
    // Who starts next clears up after the dead; one that ends in order leaves nothing.
    let last = start(&uri, &[]);
    last.signal("-TERM");
    assert_eq!(last.wait(), Some(0));
    assert_eq!(
        std::fs::read_dir(folder.join(".unfinished"))
            .unwrap()
            .count(),
        0
    );
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn two_servers_share_a_folder_and_neither_disturbs_the_other() {
    let folder = folder("server-shared");
    let uri = address_of(&folder);
    let (first, second) = (start(&uri, &[]), start(&uri, &[]));
    let claims = || {
        std::fs::read_dir(folder.join(".unfinished"))
            .unwrap()
            .count()
    };
    assert_eq!(claims(), 4, "a lock and a folder each");
    let told = ask(&first, 1);
    assert_eq!(told.cached, 0);
    until(&first, "written", PAGES);
    let shared = ask(&second, 1);
    assert_eq!((shared.storage, &shared.text), (WHOLE, &told.text));
    let third = start(&uri, &[]);
    assert_eq!(claims(), 6, "a start takes nothing from the living");
    assert_eq!(ask(&third, 1).storage, WHOLE);
    let other = ask(&first, 99);
    until(&first, "written", 2 * PAGES);
    assert_eq!(ask(&second, 99).text, other.text);
    for server in [first, second, third] {
        server.signal("-TERM");
        assert_eq!(server.wait(), Some(0));
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// How a number was rounded depends on the instructions: pages of one set are not those of another.
#[test]
fn runs_of_one_instruction_set_do_not_read_the_pages_of_another() {
    let folder = folder("server-isa");
    let uri = address_of(&folder);
    let mut sets = vec!["scalar"];
    for isa in ["avx2", "avx512"] {
        let output = running::rootstock(&["--isa", isa, "--model", "/nonexistent"]).output();
        let text = String::from_utf8(output.unwrap().stderr).unwrap();
        // The set is looked at before the model.
        if text.contains("/nonexistent") && !text.contains("--isa") {
            sets.push(isa);
        } else {
            println!("skipped: no {isa} on this machine");
        }
    }
    let stop = |server: Running| {
        server.signal("-TERM");
        assert_eq!(server.wait(), Some(0));
    };
    let mut texts = Vec::new();
    for (index, isa) in (1..).zip(&sets) {
        let server = start(&uri, &["--isa", isa]);
        let told = ask(&server, 1);
        assert_eq!(
            (told.cached, told.storage),
            (0, 0),
            "{isa} reads what is not its own"
        );
        until(&server, "pages", PAGES * index);
        stop(server);
        texts.push(told.text);
    }
    for (isa, text) in sets.iter().zip(&texts) {
        let server = start(&uri, &["--isa", isa]);
        let told = ask(&server, 1);
        assert_eq!((told.storage, &told.text), (WHOLE, text), "{isa}");
        stop(server);
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn the_secrets_of_an_address_are_not_shown() {
    let output = running::rootstock(&["--storage", "ftp://me:secret@host/x", "--host-kv-mib", "4"]);
    let mut output = output;
    let model = running::tiny_model();
    let output = output
        .args(["--model", model.path.to_str().unwrap(), "--port", "0"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        text.contains("ftp://host/x") && !text.contains("secret"),
        "{text}"
    );
}

/// Asks the route that attaches and detaches; the status.
fn storage(server: &Running, method: &str, body: &str) -> u16 {
    let mut socket = TcpStream::connect(&server.address).unwrap();
    let length = body.len();
    let head = format!("{method} /v1/kv/storage HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
    let request = format!("{head}content-length: {length}\r\n\r\n{body}");
    socket.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    text[9..12].parse().unwrap()
}

/// Runs `act` while conversations are asked for, each of which has to say what it said before.
fn under_load(server: &Running, texts: &[String], act: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        for first in 0..2 {
            scope.spawn(move || {
                for number in (first..).step_by(2) {
                    let conversation = number % texts.len();
                    let said = ask(server, 500 + conversation as u64).text;
                    assert_eq!(said, texts[conversation]);
                    if stop.load(Ordering::Acquire) {
                        return;
                    }
                }
            });
        }
        act();
        stop.store(true, Ordering::Release);
    });
}

#[test]
fn a_store_comes_and_goes_under_load_and_no_text_changes() {
    let folder = folder("server-attached");
    let wanted = format!(
        "{{\"uri\": \"{}\", \"quota_mib\": 64}}",
        address_of(&folder)
    );
    let fixed = [
        "--storage-control",
        "true",
        "--write-policy",
        "through",
        "--host-kv-mib",
        "4",
    ];
    let one = Running::start(&fixed);
    let known = ask(&one, 7);
    let texts: Vec<String> = (0..6).map(|number| ask(&one, 500 + number).text).collect();
    under_load(&one, &texts, || {
        assert_eq!(storage(&one, "DELETE", ""), 409, "there is none");
        assert_eq!(storage(&one, "POST", "{\"uri\": \"nowhere://x\"}"), 400);
        assert_eq!(storage(&one, "POST", &wanted), 200);
        assert_eq!(storage(&one, "POST", &wanted), 409, "there is one");
        assert_eq!(ask(&one, 7).text, known.text);
        // The six have two halves in common and six of their own; the seventh shares nothing.
        until(&one, "pages", 5 * PAGES);
    });
    drop(one);
    let two = Running::start(&fixed);
    under_load(&two, &texts, || {
        assert_eq!(storage(&two, "POST", &wanted), 200);
        until(&two, "pages", 5 * PAGES);
        let found = ask(&two, 7);
        assert_eq!((&found.text, found.storage), (&known.text, WHOLE));
        assert_eq!(storage(&two, "DELETE", ""), 200);
        let before = files(&folder);
        let again = ask(&two, 7);
        assert_eq!((again.text, again.storage), (known.text, 0));
        let fresh = ask(&two, 8);
        assert_eq!(
            (fresh.storage, files(&folder)),
            (0, before),
            "nothing touches it"
        );
        // And comes back.
        assert_eq!(storage(&two, "POST", &wanted), 200);
        until(&two, "pages", PAGES);
    });
    // It writes on while it lives.
    drop(two);
    assert_eq!(storage(&Running::start(&[]), "POST", &wanted), 403);
    std::fs::remove_dir_all(&folder).unwrap();
}
