//! The requests of a simulated world: prompts that share and go on, hints, sampling, deadlines.

use rootstock_radix::{Hints, TenantId, Ttl};
use rootstock_scheduler::{Class, NewRequest, SamplingParams};

use crate::rng::Rng;
use crate::sim::Sim;
use crate::swarm::Swarm;
use crate::text;

impl Sim {
    pub(crate) fn invent(&mut self) -> NewRequest {
        let swarm = self.swarm.clone();
        let rng = &mut self.rng;
        let mut ns = *rng.pick(&self.namespaces);
        let mut tokens = rng.pick(&self.families).clone();
        if rng.percent(swarm.turns) && !self.conversations.is_empty() {
            let at = rng.below(u32::try_from(self.conversations.len()).unwrap_or(1)) as usize;
            (ns, tokens) = self.conversations[at].clone();
        }
        let fresh = rng.between(u32::from(tokens.is_empty()), swarm.fresh_max);
        tokens.extend((0..fresh).map(|_| rng.below(text::VOCAB)));
        let spread = i32::try_from(swarm.priority_spread).unwrap_or(0);
        let priority = i32::try_from(rng.below(2 * swarm.priority_spread + 1)).unwrap_or(0);
        let hints = Hints {
            priority: priority - spread,
            jump_s: f64::from(rng.below(swarm.jump_max + 1)),
            strict: rng.below(swarm.strict_spread + 1),
            pins: pins_of(rng, &swarm, tokens.len()),
            program: rng.percent(40).then(|| format!("p{}", rng.below(6))),
            parent: rng.percent(20).then(|| format!("p{}", rng.below(6))),
            session_final: rng.percent(10),
            iat_ms: rng.percent(20).then(|| rng.below(20_000)),
            osl: rng.percent(40).then(|| rng.below(80)),
            ..Hints::default()
        };
        let mut sampling = SamplingParams::greedy();
        if rng.percent(swarm.sampled) {
            sampling = SamplingParams {
                temperature: 1.0,
                seed: rng.next_u64(),
                ..sampling
            };
        }
        if rng.percent(swarm.penalties) {
            sampling.frequency_penalty = 0.5;
        }
        let max_tokens = rng.between(1, swarm.output_max);
        NewRequest {
            tenant: TenantId(rng.below(3)),
            min_tokens: if rng.percent(swarm.minimums) {
                rng.below(max_tokens + 1)
            } else {
                0
            },
            stop_tokens: vec![0, 1],
            ignore_eos: rng.percent(20),
            sampling,
            hints,
            class: if rng.percent(swarm.speculative) {
                Class::Speculative
            } else {
                Class::Client
            },
            deadline: rng
                .percent(swarm.deadlines)
                .then(|| self.now + u64::from(rng.below(u32::MAX)) * 8),
            label: rng.next_u64(),
            ..NewRequest::new(ns, tokens, max_tokens)
        }
    }
}

/// Up to two pins: the whole prompt, a prefix, now and then one of no length or no time.
fn pins_of(rng: &mut Rng, swarm: &Swarm, prompt: usize) -> Vec<(u32, Ttl)> {
    let mut pins = Vec::new();
    while pins.len() < 2 && rng.percent(swarm.pins) {
        let prefix = rng.below(u32::try_from(prompt).unwrap_or(0) + 1);
        let end = if rng.percent(50) { u32::MAX } else { prefix };
        let seconds = u64::from(rng.below(swarm.pin_ttl_max + 1));
        let clamped = false;
        pins.push((end, Ttl { seconds, clamped }));
    }
    pins
}
