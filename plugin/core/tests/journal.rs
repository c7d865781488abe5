//! A journal replays exactly, finds every change, and survives every damage.
#![expect(
    clippy::cast_possible_truncation,
    clippy::wildcard_enum_match_arm,
    reason = "small numbers, and rewriting keeps the other entries"
)]

#[path = "support/load.rs"]
mod load;

use std::io::{self, Write};

use load::{Random, Sink, config, drive};
use rootstock::ServingCore;
use rootstock::journal::{
    Entry, JOURNAL_VERSION, Journal, JournalError, JournalLimits, JournalReader, JournalState,
    ReplayEnd, ReplayReport, replay,
};
use rootstock::memory::ReplicaId;
use rootstock::radix::NamespaceKey;
use rootstock::scheduler::{NewRequest, Row, RowOut, StepLoad, StepOutput};

/// Records a load and returns the journal's bytes.
fn record(seed: u64, rounds: u32, limits: JournalLimits) -> Vec<u8> {
    let sink = Sink::default();
    let mut core = ServingCore::new(config()).expect("a sound configuration");
    let journal = Journal::new(Box::new(sink.clone()), core.config(), limits).expect("a journal");
    core.set_journal(Some(journal));
    let outcome = drive(&mut core, seed, rounds);
    core.check().expect("everything adds up");
    assert_eq!(
        outcome.admitted, outcome.finals,
        "one final event per request"
    );
    drop(core);
    sink.bytes()
}

/// Writes a journal again, with each entry changed by `change`.
fn rewrite(bytes: &[u8], mut change: impl FnMut(u64, Entry<'static>) -> Entry<'static>) -> Vec<u8> {
    let mut reader = JournalReader::open(bytes).expect("a sound journal");
    let sink = Sink::default();
    let mut journal = Journal::new(
        Box::new(sink.clone()),
        reader.config(),
        JournalLimits::default(),
    )
    .expect("a journal");
    while let Ok(entry) = reader.next_entry().expect("a sound journal") {
        journal.record(&change(reader.frame(), entry));
    }
    drop(journal);
    sink.bytes()
}

fn exact(report: &ReplayReport) {
    assert!(report.is_exact(), "{:?}", report.first_mismatch);
}

/// A text that repeats itself is guessed, several tokens a row, and every guess is right.
#[test]
fn the_steps_of_a_replay_count_the_guesses_that_they_verified() {
    let mut config = config();
    config.cache.device_pages = vec![40];
    config.scheduler.max_in_flight = 1;
    (config.scheduler.max_drafts, config.scheduler.prompt_lookup) = (4, true);
    let sink = Sink::default();
    let mut core = ServingCore::new(config).expect("a sound configuration");
    let limits = JournalLimits::default();
    let journal = Journal::new(Box::new(sink.clone()), core.config(), limits).expect("a journal");
    core.set_journal(Some(journal));
    let ns = core.namespace(&NamespaceKey::default()).expect("one fits");
    core.add(NewRequest::new(ns, [0, 1, 2, 3].repeat(6), 20), 1);
    let (mut now, mut loads, mut guesses) = (1, Vec::new(), 0);
    while let Some(plan) = core.schedule(ReplicaId(0), now) {
        now += 1_000_000;
        loads.push(plan.load());
        guesses += plan.rows.iter().map(Row::guess_count).sum::<u32>();
        let rows = plan.rows.iter().map(|row| {
            let next = row.first_pos + row.len;
            let drawn = row.sample.iter().flat_map(|_| 0..=row.guess_count());
            let accepted = drawn.map(|at| (next + at) % 4).collect();
            RowOut {
                accepted,
                logprobs: None,
            }
        });
        let rows = rows.collect();
        core.complete(ReplicaId(0), plan.id, &StepOutput { rows }, now);
    }
    drop(core);
    let report = replay(&sink.bytes()[..]).expect("a sound journal");
    exact(&report);
    assert!(guesses > 4, "{guesses} guesses");
    let counted: Vec<StepLoad> = report.steps.iter().map(|step| step.load).collect();
    assert_eq!(counted, loads);
    let tokens: u32 = counted.iter().map(|load| load.tokens).sum();
    assert!(tokens >= 24 + guesses, "{tokens} positions");
}

#[test]
fn a_recorded_load_replays_plan_for_plan() {
    for seed in 0..8 {
        let bytes = record(seed, 400, JournalLimits::default());
        let report = replay(&bytes[..]).expect("a sound journal");
        exact(&report);
        assert_eq!(report.end, ReplayEnd::Closed);
        assert!(report.plans > 700 && report.inputs > 1200, "{report:?}");
        assert!(report.emits > 100);
    }
}

#[test]
fn a_changed_input_is_found_at_the_first_plan_it_touches() {
    let bytes = record(3, 300, JournalLimits::default());
    let unchanged = rewrite(&bytes, |_, entry| entry);
    assert_eq!(unchanged, bytes, "reading and writing loses nothing");
    let mut adds = 0;
    let changed = rewrite(&bytes, |_, entry| match entry {
        Entry::Add(mut request, now) => {
            adds += 1;
            if adds == 5 {
                request.to_mut().tokens[0] ^= 1;
            }
            Entry::Add(request, now)
        }
        other => other,
    });
    let report = replay(&changed[..]).expect("a well-formed journal");
    let first = report.first_mismatch.as_ref().expect("the change is found");
    assert!(report.mismatches >= 1 && !report.is_exact());
    assert_ne!(first.recorded.hash, first.replayed.hash);
    let shown = format!("recorded {}, replayed {}", first.recorded, first.replayed);
    assert!(shown.contains("rows") && shown.contains("hash"), "{shown}");
}

#[test]
fn a_lost_completion_is_found() {
    let bytes = record(4, 200, JournalLimits::default());
    let mut completions = 0;
    let changed = rewrite(&bytes, |_, entry| match entry {
        Entry::Complete(replica, step, output, now) => {
            completions += 1;
            if completions == 20 {
                Entry::Tick(now)
            } else {
                Entry::Complete(replica, step, output, now)
            }
        }
        other => other,
    });
    let report = replay(&changed[..]).expect("a well-formed journal");
    assert!(!report.is_exact());
}

#[test]
fn a_flipped_bit_anywhere_is_found() {
    let bytes = record(5, 40, JournalLimits::default());
    let mut random = Random(99);
    for _ in 0..200 {
        let mut damaged = bytes.clone();
        let at = random.below(bytes.len() as u64) as usize;
        damaged[at] ^= 1 << random.below(8);
        match replay(&damaged[..]) {
            Err(_) => {}
            // A damaged length may reach past the end: that reads as torn, never as whole.
            Ok(report) => assert!(matches!(report.end, ReplayEnd::Torn { .. }), "byte {at}"),
        }
    }
}

#[test]
fn a_torn_journal_gives_everything_before_the_tear() {
    let bytes = record(6, 6, JournalLimits::default());
    let whole = replay(&bytes[..]).expect("a sound journal");
    let mut last = 0;
    // Coprime to every field's size: tears fall into each part of a frame.
    for length in (0..bytes.len()).step_by(7).chain([bytes.len() - 1]) {
        match replay(&bytes[..length]) {
            Err(JournalError::NotAJournal | JournalError::NoHeader) => {}
            Err(error) => panic!("{length}: {error}"),
            Ok(report) => {
                exact(&report);
                assert!(matches!(
                    report.end,
                    ReplayEnd::Cut | ReplayEnd::Torn { .. }
                ));
                assert!(report.inputs >= last, "more bytes never give less");
                last = report.inputs;
            }
        }
    }
    assert_eq!(last, whole.inputs);
}

#[test]
fn another_version_and_other_files_are_refused_by_name() {
    let mut bytes = record(7, 5, JournalLimits::default());
    let version_at = bytes.iter().position(|b| *b == b'\n').expect("a magic") + 1;
    bytes[version_at] = 250;
    let error = replay(&bytes[..]).expect_err("another version");
    assert!(
        matches!(
            error,
            JournalError::Version {
                found: 250,
                supported: JOURNAL_VERSION
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("version 250"));
    let error = replay(&b"{\"not\": \"a journal, but long enough\"}"[..]).expect_err("a JSON file");
    assert!(matches!(error, JournalError::NotAJournal));
    assert!(matches!(replay(&b""[..]), Err(JournalError::NotAJournal)));
}

#[test]
fn a_full_journal_says_so_and_stays_within_its_limit() {
    let limits = JournalLimits {
        max_bytes: 64 * 1024,
    };
    let sink = Sink::default();
    let mut core = ServingCore::new(config()).expect("a sound configuration");
    let journal = Journal::new(Box::new(sink.clone()), core.config(), limits).expect("a journal");
    core.set_journal(Some(journal));
    let outcome = drive(&mut core, 8, 2000);
    assert_eq!(
        outcome.admitted, outcome.finals,
        "serving goes on unrecorded"
    );
    let stats = core.stats().journal.expect("a journal is set");
    assert_eq!(stats.state, JournalState::Full);
    assert!(stats.dropped > 0 && stats.bytes <= limits.max_bytes);
    drop(core);
    let bytes = sink.bytes();
    assert_eq!(bytes.len() as u64, stats.bytes);
    let report = replay(&bytes[..]).expect("a sound journal");
    exact(&report);
    assert_eq!(report.end, ReplayEnd::Full);
    assert!(report.plans > 100);

    let tiny = JournalLimits { max_bytes: 1000 };
    let error = Journal::new(Box::new(io::sink()), &config(), tiny).expect_err("too small");
    assert!(error.to_string().contains("at least 65536"), "{error}");
}

/// A disk that fills up.
struct Failing(usize);

impl Write for Failing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0 < bytes.len() {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        self.0 -= bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_failing_sink_ends_the_recording_not_the_serving() {
    let mut core = ServingCore::new(config()).expect("a sound configuration");
    let sink = Box::new(Failing(100_000));
    let journal = Journal::new(sink, core.config(), JournalLimits::default()).expect("a journal");
    core.set_journal(Some(journal));
    let outcome = drive(&mut core, 9, 3000);
    assert_eq!(outcome.admitted, outcome.finals);
    let stats = core.stats().journal.expect("a journal is set");
    assert_eq!(
        stats.state,
        JournalState::Failed(io::ErrorKind::StorageFull)
    );
    assert!(stats.dropped > 0);
}

#[test]
fn made_up_journals_never_panic() {
    let bytes = record(10, 60, JournalLimits::default());
    for seed in 0..60 {
        let mut random = Random(seed);
        let mut kept: Vec<Entry<'static>> = Vec::new();
        // Entries are doubled, swapped and given foreign ids; the checks of all frames fit.
        let changed = rewrite(&bytes, |_, entry| {
            if kept.len() < 64 && entry.is_input() {
                kept.push(entry.clone());
            }
            match entry {
                Entry::Plan(mark) => Entry::Plan(mark),
                entry if kept.is_empty() || random.below(4) > 0 => entry,
                Entry::Complete(replica, mut step, mut output, now) => {
                    step.0 += random.below(3);
                    output.to_mut().rows.truncate(random.below(3) as usize);
                    Entry::Complete(replica, step, output, now)
                }
                _ => kept[random.below(kept.len() as u64) as usize].clone(),
            }
        });
        match replay(&changed[..]) {
            Ok(_) | Err(JournalError::Corrupt { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}
