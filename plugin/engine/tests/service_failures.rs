//! A backend that fails, panics, or is lost: whose requests end how, and what goes on.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::wildcard_enum_match_arm,
    reason = "helpers of tests, with small numbers"
)]

#[path = "support/tiny.rs"]
mod tiny;

use std::collections::VecDeque;

use rootstock::memory::{
    CopyDone, CopyEngine, CopyPlan, Full, KvDtype, KvLayout, LayoutOrder, LayoutSpec, StepId,
};
use rootstock::scheduler::{FailKind, FinishReason, RowOut, StepOutput, StepPlan};
use rootstock::{Backend, Caps, StepError};
use rootstock_engine::service::{
    Event, ModelIdentity, Service, ServiceConfig, Submission, SubmitError, Ticket,
};

/// What the double does with a step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Act {
    Answer,
    AnswerNothing,
    Fail,
    FailLaunch,
    Panic,
    PanicLaunch,
    Lose,
}

struct NoCopies;

impl CopyEngine for NoCopies {
    fn submit(&mut self, plan: CopyPlan) -> Result<(), (CopyPlan, Full)> {
        Err((plan, Full))
    }

    fn poll(&mut self, _done: &mut Vec<CopyDone>) {}
}

/// Draws position + 1 as the next token; `decide` says what becomes of each step. Each computed
/// step is announced on `seen` and waits for a word on `go`, so that tests hold the clock.
struct Double {
    decide: Box<dyn FnMut(&StepPlan) -> Act + Send>,
    flying: VecDeque<(StepPlan, Act)>,
    copies: NoCopies,
    max_in_flight: u8,
    gate: Option<(flume::Sender<StepId>, flume::Receiver<()>)>,
}

impl Double {
    fn new(decide: impl FnMut(&StepPlan) -> Act + Send + 'static) -> Self {
        Self {
            decide: Box::new(decide),
            flying: VecDeque::new(),
            copies: NoCopies,
            max_in_flight: 1,
            gate: None,
        }
    }

    fn start(self) -> Service {
        let config = ServiceConfig {
            device_pages: Some(32),
            max_in_flight: Some(self.max_in_flight),
            ..ServiceConfig::default()
        };
        let identity = ModelIdentity {
            name: "double".into(),
            revision: "1".into(),
            context: 256,
            weight_bytes: 0,
        };
        Service::start_with(config, vec![Box::new(self)], identity).unwrap()
    }
}

impl Backend for Double {
    fn caps(&self) -> Caps {
        let spec = LayoutSpec {
            order: LayoutOrder::PageFirst,
            page_tokens: 4,
            layers: 1,
            kv_heads: 1,
            head_dim: 16,
            dtype: KvDtype::F16,
        };
        Caps {
            layout: KvLayout::new(spec).unwrap(),
            numerics_id: "double".into(),
            max_in_flight: self.max_in_flight,
            vocab: 1000,
        }
    }

    fn launch(&mut self, plan: StepPlan) -> Result<(), StepError> {
        let act = (self.decide)(&plan);
        let step = plan.id;
        match act {
            Act::PanicLaunch => panic!("launch of a double"),
            Act::FailLaunch => Err(StepError::Failed {
                step,
                message: "no".into(),
            }),
            _ => {
                self.flying.push_back((plan, act));
                Ok(())
            }
        }
    }

    fn wait(&mut self, step: StepId) -> Result<StepOutput, StepError> {
        let (plan, act) = self
            .flying
            .pop_front()
            .ok_or(StepError::NotInFlight { step })?;
        assert_eq!(plan.id, step);
        if let Some((seen, go)) = &self.gate {
            seen.send(step).unwrap();
            go.recv().unwrap();
        }
        match act {
            Act::Fail => Err(StepError::Failed {
                step,
                message: "out of luck".into(),
            }),
            Act::Panic => panic!("step of a double"),
            Act::Lose => Err(StepError::Lost {
                step,
                message: "unplugged".into(),
            }),
            _ => {
                let row = |row: &rootstock::scheduler::Row| {
                    let draws = row.sample.is_some() && act == Act::Answer;
                    let accepted = draws
                        .then_some(row.first_pos + row.len)
                        .into_iter()
                        .collect();
                    RowOut {
                        accepted,
                        logprobs: None,
                    }
                };
                Ok(StepOutput {
                    rows: plan.rows.iter().map(row).collect(),
                })
            }
        }
    }

    fn copies(&mut self) -> &mut dyn CopyEngine {
        &mut self.copies
    }
}

fn end(ticket: &Ticket) -> (Vec<u32>, FinishReason) {
    let mut tokens = Vec::new();
    for event in ticket.events.iter() {
        match event {
            Event::Started { .. } => {}
            Event::Tokens { tokens: more, .. } => tokens.extend(more),
            Event::Final { reason, .. } => return (tokens, reason),
        }
    }
    panic!("closed without a final event");
}

const FAILED: FinishReason = FinishReason::Failed(FailKind::Step);

#[test]
fn a_failed_or_panicked_step_fails_its_requests_and_the_service_lives() {
    for act in [Act::Fail, Act::Panic, Act::FailLaunch, Act::PanicLaunch] {
        for max_in_flight in [1, 2] {
            let mut bad_once = Some(act);
            let mut double = Double::new(move |plan| {
                // The third step of the doomed prompt, whose first token is 1.
                let doomed = plan.rows.iter().any(|row| row.first_pos == 6);
                if doomed {
                    bad_once.take().unwrap_or(Act::Answer)
                } else {
                    Act::Answer
                }
            });
            double.max_in_flight = max_in_flight;
            let service = double.start();
            let doomed = service.submit(Submission::new(vec![1; 5], 40)).unwrap();
            let (tokens, reason) = end(&doomed);
            assert_eq!(reason, FAILED, "{act:?}");
            assert_eq!(tokens, [5, 6], "{act:?}: tokens of good steps arrive");
            let next = service.submit(Submission::new(vec![1; 5], 10)).unwrap();
            assert_eq!(
                end(&next),
                ((5..15).collect(), FinishReason::Length),
                "{act:?}"
            );
            assert!(service.alive() && service.ready());
            let stats = service.stats();
            assert_eq!(stats.finished.failed, 1);
            assert!(stats.steps_failed >= 1);
            service.flush().unwrap();
        }
    }
}

#[test]
fn a_row_without_a_token_fails_only_its_own_request() {
    let double = Double::new(|plan| match plan.rows.as_slice() {
        [row] if row.first_pos == 5 => Act::AnswerNothing,
        _ => Act::Answer,
    });
    let service = double.start();
    let bad = service.submit(Submission::new(vec![1; 5], 40)).unwrap();
    assert_eq!(end(&bad).1, FinishReason::Failed(FailKind::BadOutput));
    let good = service.submit(Submission::new(vec![2; 9], 3)).unwrap();
    assert_eq!(end(&good), (vec![9, 10, 11], FinishReason::Length));
    assert_eq!(service.stats().steps_failed, 0);
}

#[test]
fn a_lost_backend_ends_every_request_and_readiness_says_so() {
    let (seen_in, _seen) = flume::unbounded();
    let (go, go_out) = flume::unbounded();
    let mut double = Double::new(|plan| {
        let late = plan.rows.iter().any(|row| row.first_pos >= 8);
        if late { Act::Lose } else { Act::Answer }
    });
    double.gate = Some((seen_in, go_out));
    let service = double.start();
    let tickets: Vec<Ticket> = (1..9)
        .map(|i| service.submit(Submission::new(vec![i; 5], 40)).unwrap())
        .collect();
    // Only now may the first step end.
    (0..100).for_each(|_| go.send(()).unwrap());
    for ticket in &tickets {
        assert_eq!(end(ticket).1, FAILED);
    }
    // The last word of the thread follows its last outcome, so death may take one more message.
    let refused = service.submit(Submission::new(vec![1], 1)).unwrap_err();
    assert_eq!(refused, SubmitError::EngineDead);
    assert!(!service.alive() && !service.ready());
    assert!(service.flush().is_ok(), "nothing is held by the dead");
}

#[test]
fn a_dropped_ticket_costs_at_most_one_further_step() {
    let (seen_in, seen) = flume::unbounded();
    let (go, go_out) = flume::unbounded();
    let mut double = Double::new(|_| Act::Answer);
    double.gate = Some((seen_in, go_out));
    let service = double.start();
    let ticket = service.submit(Submission::new(vec![1; 5], 200)).unwrap();
    for _ in 0..3 {
        seen.recv().unwrap();
        go.send(()).unwrap();
    }
    let running = seen.recv().unwrap();
    drop(ticket);
    // The running step may end; another must not begin, so this request's is the next.
    let next = service.submit(Submission::new(vec![9; 7], 1)).unwrap();
    go.send(()).unwrap();
    let after = seen.recv().unwrap();
    go.send(()).unwrap();
    assert_eq!(end(&next), (vec![7], FinishReason::Length));
    assert_eq!(after.0, running.0 + 1);
    assert!(seen.is_empty(), "no step was run for the dropped request");
    assert_eq!(service.stats().finished.aborted, 1);
}

#[test]
fn dropping_the_service_ends_its_requests() {
    let (seen_in, seen) = flume::unbounded();
    let (go, go_out) = flume::unbounded();
    let mut double = Double::new(|_| Act::Answer);
    double.gate = Some((seen_in, go_out));
    let service = double.start();
    let ticket = service.submit(Submission::new(vec![1; 5], 200)).unwrap();
    seen.recv().unwrap();
    let closing = std::thread::spawn(move || drop(service));
    assert_eq!(end(&ticket).1, FinishReason::Aborted);
    go.send(()).unwrap();
    closing.join().unwrap();
}
