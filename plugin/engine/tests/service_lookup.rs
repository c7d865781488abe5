//! Guesses looked up in the text change no text: greedy and sampled, with log probabilities, alone
//! and in company, with one step in flight or two.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "helpers of tests, with small numbers"
)]

#[path = "support/tiny.rs"]
mod tiny;

use proptest::prelude::*;
use rootstock::scheduler::SamplingParams;
use rootstock_engine::service::{Event, Service, ServiceConfig, Submission};
use tiny::VOCAB;

fn start(family: &str, prompt_lookup: u8, max_in_flight: u8) -> Service {
    let config = ServiceConfig {
        device_pages: Some(120),
        host_pages: Some(0),
        page_size: 4,
        threads: Some(2),
        max_in_flight: Some(max_in_flight),
        step_tokens: 24,
        prompt_lookup,
        ..ServiceConfig::default()
    };
    Service::start(&tiny::file(family), config).unwrap()
}

/// What requests that run together say, with the log probability of each token.
fn texts(service: &Service, submissions: &[Submission]) -> Vec<Vec<(u32, Option<f32>)>> {
    let tickets: Vec<_> = submissions
        .iter()
        .map(|one| service.submit(one.clone()).unwrap())
        .collect();
    let read = |ticket: &rootstock_engine::service::Ticket| {
        let mut said = Vec::new();
        for event in ticket.events.iter() {
            match event {
                Event::Started { .. } => {}
                Event::Tokens { tokens, logprobs } => {
                    let list = logprobs.map(|list| list.tokens);
                    assert!(list.as_ref().is_none_or(|list| list.len() == tokens.len()));
                    said.extend(tokens.into_iter().enumerate().map(|(i, token)| {
                        let of = list.as_ref().map(|list| &list[i]);
                        assert!(of.is_none_or(|of| of.token == token));
                        (token, of.map(|of| of.logprob))
                    }));
                }
                Event::Final { .. } => return said,
            }
        }
        panic!("the channel closed without a final event");
    };
    tickets.iter().map(read).collect()
}

/// Guesses verified, and right ones.
fn guesses(service: &Service) -> (u64, u64) {
    let core = service.stats().core.unwrap();
    let all = &core.schedulers;
    (
        all.iter().map(|stats| stats.guessed_tokens).sum(),
        all.iter().map(|stats| stats.right_guesses).sum(),
    )
}

fn request(pattern: &[u32], repeats: usize, sampled: Option<u64>) -> Submission {
    let prompt: Vec<u32> = pattern.repeat(repeats);
    let mut one = Submission::new(prompt, 40);
    if let Some(seed) = sampled {
        one.sampling = SamplingParams {
            temperature: 0.8,
            top_k: 20,
            seed,
            ..SamplingParams::greedy()
        };
    }
    one.sampling.logprobs = pattern.len().is_multiple_of(2).then_some(2);
    one
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn a_text_is_the_same_with_guesses_and_without(
        patterns in prop::collection::vec(
            (
                prop::collection::vec(0..VOCAB as u32, 2..9),
                2_usize..6,
                prop::option::weighted(0.3, any::<u64>()),
            ),
            1..6,
        ),
        max_in_flight in 1_u8..3,
        family in prop::sample::select(vec!["llama", "qwen3"]),
    ) {
        let submissions: Vec<Submission> = patterns
            .iter()
            .map(|(pattern, repeats, sampled)| request(pattern, *repeats, *sampled))
            .collect();
        let plain = start(family, 0, max_in_flight);
        let expected = texts(&plain, &submissions);
        prop_assert_eq!(guesses(&plain), (0, 0));
        for prompt_lookup in [1, 8] {
            let guessing = start(family, prompt_lookup, max_in_flight);
            prop_assert_eq!(&texts(&guessing, &submissions), &expected);
        }
    }
}

#[test]
fn a_greedy_text_that_goes_in_circles_is_guessed_and_takes_fewer_steps() {
    let run = |prompt_lookup| {
        let service = start("llama", prompt_lookup, 1);
        let one = Submission::new(vec![5, 9, 5, 9, 5, 9], 120);
        let said = texts(&service, &[one]);
        (said, service.stats().steps, guesses(&service))
    };
    let (expected, steps, none) = run(0);
    assert_eq!(none, (0, 0));
    let (said, fewer, (guessed, right)) = run(8);
    assert_eq!(said, expected);
    assert!(right > 20 && right <= guessed, "{right} of {guessed}");
    assert!(fewer < steps - 20, "{fewer} steps of {steps}");
}
