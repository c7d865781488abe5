//! The service over the real CPU backend and a tiny model: texts, cache, preemption, tickets.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "helpers of tests, with small numbers"
)]

#[path = "support/tiny.rs"]
mod tiny;

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rootstock::journal::{JournalLimits, JournalReader, replay};
use rootstock::memory::KvDtype;
use rootstock::scheduler::{FinishReason, SamplingParams, Usage};
use rootstock_engine::service::{
    Drained, Event, FlushError, JournalSink, Service, ServiceConfig, Submission, SubmitError,
    Ticket,
};
use tiny::VOCAB;

fn config(device_pages: u32, max_in_flight: u8) -> ServiceConfig {
    ServiceConfig {
        device_pages: Some(device_pages),
        host_pages: Some(0),
        page_size: 4,
        threads: Some(2),
        max_in_flight: Some(max_in_flight),
        step_tokens: 24,
        ..ServiceConfig::default()
    }
}

fn start(config: ServiceConfig) -> Service {
    Service::start(&tiny::file("qwen3"), config).unwrap()
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len)
        .map(|i| (seed * 101 + i * i * 7 + i) % VOCAB as u32)
        .collect()
}

struct Answer {
    tokens: Vec<u32>,
    reason: FinishReason,
    usage: Usage,
}

/// Reads a ticket to its end; checks the order of its events.
fn read(ticket: &Ticket) -> Answer {
    let mut tokens = Vec::new();
    let mut started = 0;
    for event in ticket.events.iter() {
        match event {
            Event::Started { .. } => {
                started += 1;
                assert!(tokens.is_empty());
            }
            Event::Tokens { tokens: more, .. } => {
                assert_eq!(started, 1);
                tokens.extend(more);
            }
            Event::Final { reason, usage } => {
                assert!(ticket.events.recv().is_err(), "nothing follows the end");
                return Answer {
                    tokens,
                    reason,
                    usage,
                };
            }
        }
    }
    panic!("the channel closed without a final event");
}

fn ask(service: &Service, submission: Submission) -> Answer {
    read(&service.submit(submission).unwrap())
}

#[test]
fn a_warm_answer_equals_the_cold_one_and_reports_its_cached_tokens() {
    let service = start(config(64, 1));
    let cold = ask(&service, Submission::new(prompt(1, 22), 12));
    assert_eq!(cold.usage.cached.total(), 0);
    assert_eq!((cold.reason, cold.tokens.len()), (FinishReason::Length, 12));
    let warm = ask(&service, Submission::new(prompt(1, 22), 12));
    assert_eq!(
        warm.usage.cached.device, 20,
        "all whole pages but the last token's"
    );
    assert_eq!(warm.tokens, cold.tokens);
    let mut longer = prompt(1, 22);
    longer.extend(&cold.tokens);
    let next = ask(&service, Submission::new(longer.clone(), 6));
    assert_eq!(
        next.usage.cached.device, 32,
        "the second turn reuses prompt and answer"
    );
    service.flush().unwrap();
    let again = ask(&service, Submission::new(longer, 6));
    assert_eq!(again.usage.cached.total(), 0, "a flush forgets");
    assert_eq!(again.tokens, next.tokens);
    let stats = service.stats();
    assert_eq!(stats.admitted, 4);
    assert_eq!(stats.finished.length, 4);
    assert_eq!(stats.cached.device, 52);
    assert_eq!(stats.generated_tokens, 36);
    assert_eq!(stats.ttft_s.count(), 4);
    assert_eq!(stats.tpot_s.count(), 4);
}

/// Answers of requests that run at the same time.
fn together(service: &Service, submissions: &[Submission]) -> Vec<Answer> {
    let tickets: Vec<Ticket> = submissions
        .iter()
        .map(|one| service.submit(one.clone()).unwrap())
        .collect();
    tickets.iter().map(read).collect()
}

fn mixed() -> Vec<Submission> {
    (0..8)
        .map(|i| {
            let mut one = Submission::new(prompt(i % 5, 6 + i * 5), 10 + i * 3);
            if i % 3 == 0 {
                one.sampling = SamplingParams {
                    temperature: 0.9,
                    top_k: 40,
                    top_p: 0.95,
                    seed: u64::from(i),
                    ..SamplingParams::greedy()
                };
            }
            one
        })
        .collect()
}

fn alone(kv_dtype: KvDtype) -> Vec<Vec<u32>> {
    mixed()
        .into_iter()
        .map(|one| {
            let service = start(ServiceConfig {
                kv_dtype,
                ..config(64, 1)
            });
            ask(&service, one).tokens
        })
        .collect()
}

#[test]
fn texts_are_the_same_alone_in_company_and_with_two_steps_in_flight() {
    for kv_dtype in [KvDtype::F16, KvDtype::F32] {
        let want = alone(kv_dtype);
        for max_in_flight in [1, 2] {
            let service = start(ServiceConfig {
                kv_dtype,
                ..config(256, max_in_flight)
            });
            for round in 0..2 {
                for (answer, want) in together(&service, &mixed()).iter().zip(&want) {
                    assert_eq!(
                        &answer.tokens, want,
                        "{max_in_flight} in flight, round {round}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_pool_too_small_for_all_preempts_and_evicts_without_changing_a_text() {
    let want = alone(KvDtype::F16);
    for max_in_flight in [1, 2] {
        let service = start(ServiceConfig {
            preempt_gap: Some(1),
            ..config(26, max_in_flight)
        });
        for _ in 0..3 {
            for (answer, want) in together(&service, &mixed()).iter().zip(&want) {
                assert_eq!(answer.reason, FinishReason::Length);
                assert_eq!(&answer.tokens, want, "{max_in_flight} in flight");
            }
        }
        assert_eq!(service.drain(Duration::from_secs(60)), Drained::Finished);
        let stats = service.stats();
        let core = stats.core.unwrap();
        assert!(
            core.schedulers[0].preemptions > 0,
            "the pool was too large to preempt"
        );
        assert!(
            core.cache.tiers[0].evicted_pages > 0,
            "the pool was too large to evict"
        );
        assert_eq!(stats.events_lost, 0);
    }
}

#[test]
fn a_reader_that_never_reads_holds_up_nobody() {
    let service = start(config(256, 1));
    let silent = service.submit(Submission::new(prompt(3, 9), 200)).unwrap();
    for seed in 0..4 {
        let answer = ask(&service, Submission::new(prompt(seed, 12), 30));
        assert_eq!(answer.tokens.len(), 30);
    }
    assert_eq!(
        read(&silent).tokens.len(),
        200,
        "every event waited for its reader"
    );
    assert_eq!(service.stats().events_lost, 0);
}

#[test]
fn a_dropped_ticket_aborts_its_request_and_the_pages_come_back() {
    let service = start(config(40, 2));
    let gone = service.submit(Submission::new(prompt(1, 20), 120)).unwrap();
    // It runs before it is dropped.
    assert!(matches!(gone.events.recv().unwrap(), Event::Started { .. }));
    drop(gone);
    let unstarted = service.submit(Submission::new(prompt(2, 20), 120)).unwrap();
    drop(unstarted);
    let answer = ask(&service, Submission::new(prompt(4, 20), 100));
    assert_eq!(answer.tokens.len(), 100, "30 of 40 pages were free again");
    assert_eq!(service.drain(Duration::from_secs(60)), Drained::Finished);
    let stats = service.stats();
    assert_eq!(stats.finished.aborted, 2);
    assert_eq!(stats.live, 0);
    assert!(stats.idle_checks >= 1);
    assert_eq!(stats.idle_breaches, 0, "the recount agrees");
}

#[test]
fn finishing_ends_with_stop_string_and_keeps_the_kv() {
    let service = start(config(64, 2));
    let ticket = service.submit(Submission::new(prompt(1, 20), 100)).unwrap();
    let mut tokens = Vec::new();
    let reason = loop {
        match ticket.events.recv().unwrap() {
            Event::Started { .. } => {}
            Event::Tokens { tokens: more, .. } => {
                tokens.extend(more);
                ticket.finish();
                ticket.finish();
            }
            Event::Final { reason, .. } => break reason,
        }
    };
    assert_eq!(reason, FinishReason::StopString);
    assert!(tokens.len() < 100);
    let warm = ask(&service, Submission::new(prompt(1, 20), 1));
    assert_eq!(warm.usage.cached.device, 16);
}

#[test]
fn stop_tokens_end_a_text_and_are_part_of_it() {
    let service = start(config(64, 1));
    let free = ask(&service, Submission::new(prompt(7, 10), 20)).tokens;
    let stop = free[5];
    let first = free.iter().position(|&token| token == stop).unwrap();
    let stopped = Submission {
        stop_tokens: vec![stop],
        ..Submission::new(prompt(7, 10), 20)
    };
    let answer = ask(&service, stopped.clone());
    assert_eq!(
        (answer.reason, &answer.tokens[..]),
        (FinishReason::Stop, &free[..=first])
    );
    let ignoring = ask(
        &service,
        Submission {
            ignore_eos: true,
            ..stopped
        },
    );
    assert_eq!(ignoring.tokens, free);
}

#[test]
fn logprobs_come_with_each_token_and_agree_with_the_greedy_choice() {
    let service = start(config(64, 1));
    let sampling = SamplingParams {
        logprobs: Some(3),
        ..SamplingParams::greedy()
    };
    let one = Submission {
        sampling,
        ..Submission::new(prompt(2, 9), 5)
    };
    let ticket = service.submit(one).unwrap();
    let mut seen = 0;
    for event in ticket.events.iter() {
        if let Event::Tokens { tokens, logprobs } = event {
            let entries = logprobs.unwrap().tokens;
            assert_eq!(entries.len(), tokens.len());
            for (entry, token) in entries.iter().zip(&tokens) {
                assert_eq!(entry.token, *token);
                assert_eq!(entry.top.len(), 3);
                assert_eq!(entry.top[0], (*token, entry.logprob));
                assert!(entry.logprob < 0.0 && entry.top[1].1 <= entry.logprob);
                seen += 1;
            }
        }
    }
    assert_eq!(seen, 5);
}

#[test]
fn what_cannot_run_is_refused_before_it_is_queued() {
    let service = start(ServiceConfig {
        max_queue: 1,
        max_running: 1,
        ..config(16, 1)
    });
    let refused = |submission: Submission| service.submit(submission).unwrap_err().to_string();
    assert!(refused(Submission::new(vec![1, 304], 3)).contains("token 304"));
    assert!(refused(Submission::new(Vec::new(), 3)).contains("no tokens"));
    assert!(refused(Submission::new(vec![1], 0)).contains("max_tokens"));
    assert!(
        refused(Submission::new(prompt(1, 65), 3)).contains("17"),
        "17 pages of 16"
    );
    let mut hot = Submission::new(vec![1], 3);
    hot.sampling.temperature = f32::NAN;
    assert!(refused(hot).contains("temperature"));
    let mut biased = Submission::new(vec![1], 3);
    biased.sampling.logit_bias = vec![(900, 1.0)];
    assert!(refused(biased).contains("logit_bias has token 900"));
    assert_eq!(service.stats().live, 0);
}

#[test]
fn a_full_queue_defers_and_a_drained_service_refuses() {
    let service = start(ServiceConfig {
        max_queue: 2,
        max_running: 1,
        ..config(64, 1)
    });
    let mut tickets = Vec::new();
    let deferred = loop {
        match service.submit(Submission::new(prompt(1, 8), 50)) {
            Ok(ticket) => tickets.push(ticket),
            Err(error) => break error,
        }
        assert!(
            tickets.len() <= 4,
            "one runs, two wait, and one may have ended"
        );
    };
    let SubmitError::Deferred {
        queue_cap,
        retry_after_s,
        ..
    } = deferred
    else {
        panic!("{deferred}");
    };
    assert!(queue_cap == 2 && retry_after_s >= 1);
    assert_eq!(service.drain(Duration::ZERO), Drained::Aborted);
    for ticket in &tickets {
        let reason = read(ticket).reason;
        assert!(
            matches!(reason, FinishReason::Aborted | FinishReason::Length),
            "{reason:?}"
        );
    }
    let refused = service.submit(Submission::new(vec![1], 1)).unwrap_err();
    assert_eq!(refused, SubmitError::Draining);
    assert!(service.alive() && !service.ready());
}

#[test]
fn salts_share_nothing() {
    let service = start(config(64, 1));
    let plain = Submission::new(prompt(1, 22), 4);
    let salted = Submission {
        salt: Some("team a".into()),
        ..plain.clone()
    };
    let first = ask(&service, plain.clone());
    let other = ask(&service, salted.clone());
    assert_eq!(other.usage.cached.total(), 0);
    assert_eq!(other.tokens, first.tokens);
    assert_eq!(ask(&service, salted).usage.cached.device, 20);
    assert_eq!(ask(&service, plain).usage.cached.device, 20);
}

#[test]
fn a_flush_while_something_runs_changes_nothing() {
    let service = start(config(64, 1));
    let ticket = service.submit(Submission::new(prompt(1, 22), 200)).unwrap();
    assert!(matches!(
        ticket.events.recv().unwrap(),
        Event::Started { .. }
    ));
    let refused = service.flush();
    assert!(
        matches!(refused, Err(FlushError::Refused(_))),
        "{refused:?}"
    );
    drop(ticket);
}

#[derive(Clone, Default)]
struct Tape(Arc<Mutex<Vec<u8>>>);

impl Write for Tape {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_journal_of_a_run_replays_with_equal_plans() {
    let tape = Tape::default();
    let sink = JournalSink {
        writer: Box::new(tape.clone()),
        limits: JournalLimits::default(),
    };
    let service = start(ServiceConfig {
        journal: Some(sink),
        ..config(26, 2)
    });
    together(&service, &mixed());
    drop(service.submit(Submission::new(prompt(9, 30), 60)).unwrap());
    together(&service, &mixed());
    drop(service);
    let bytes = tape.0.lock().unwrap().clone();
    let report = replay(&bytes[..]).unwrap();
    assert!(report.is_exact(), "{report:?}");
    assert!(report.plans > 50, "{report:?}");
    assert!(JournalReader::open(&bytes[..]).is_ok());
}

/// Requests that hurry come while long prompts are computed; each text is what it is alone.
#[test]
fn who_hurries_overtakes_long_prompts_and_no_text_changes() {
    let service = start(ServiceConfig {
        target_step_ms: 60_000,
        step_tokens: 256,
        ..config(400, 1)
    });
    let hurried = |seed: u32| {
        let mut submission = Submission::new(prompt(seed, 20), 4);
        submission.hints.jump_s = 10.0;
        submission
    };
    let long = |seed: u32| Submission::new(prompt(seed, 200), 3);
    let alone: Vec<_> = (0..40)
        .map(|n| ask(&service, hurried(n)).tokens)
        .chain((100..108).map(|n| ask(&service, long(n)).tokens))
        .collect();
    let mut steps = 0;
    // Whether a step is under way just then is a matter of luck, so more than once.
    for _ in 0..50 {
        service.flush().unwrap();
        let longs: Vec<_> = (100..108)
            .map(|n| service.submit(long(n)).unwrap())
            .collect();
        let texts: Vec<_> = (0..40).map(|n| ask(&service, hurried(n)).tokens).collect();
        let longs = longs.iter().map(|ticket| read(ticket).tokens);
        assert_eq!(texts.into_iter().chain(longs).collect::<Vec<_>>(), alone);
        steps = service.stats().core.unwrap().schedulers[0].overtaking_steps;
        if steps > 0 {
            break;
        }
    }
    assert!(steps > 0, "nobody overtook anybody");
    assert_eq!(service.drain(Duration::from_secs(60)), Drained::Finished);
}
