//! A whole engine in a hundred lines: `ServingCore` decides, a toy computes.
//!
//! The toy's "KV" of a token is the token itself, written to the slot that the plan names. The
//! next token is a hash of everything read back through the page table: a wrong page would change
//! the text. Run it: `cargo run -p rootstock --example toy_engine`.

use std::error::Error;
use std::io::Write;

use rootstock::memory::ReplicaId;
use rootstock::radix::{CacheConfig, NamespaceKey, Token};
use rootstock::scheduler::{Emit, NewRequest, RowOut, SchedulerConfig, StepOutput, StepPlan};
use rootstock::{CoreConfig, ServingCore};

const PAGE_TOKENS: u32 = 4;
const PAGES: u32 = 32;
const REPLICA: ReplicaId = ReplicaId(0);

/// A device of `PAGES` pages, and page 0, which nobody reads.
struct Toy {
    kv: Vec<Token>,
}

impl Toy {
    fn compute(&mut self, plan: &StepPlan) -> StepOutput {
        let mut output = StepOutput::default();
        for row in &plan.rows {
            let pages = plan.row_pages(row);
            let slot =
                |p: u32| pages[(p / PAGE_TOKENS) as usize].get() * PAGE_TOKENS + p % PAGE_TOKENS;
            for (position, token) in (row.first_pos..).zip(plan.row_tokens(row)) {
                self.kv[slot(position) as usize] = *token;
            }
            let mut out = RowOut::default();
            if row.sample.is_some() {
                let seen = (0..row.first_pos + row.len).map(|p| self.kv[slot(p) as usize]);
                out.accepted
                    .push(seen.fold(7, |hash, t| (hash ^ t).rotate_left(5)) % 1000);
            }
            output.rows.push(out);
        }
        output
    }
}

/// Generates for one prompt until its final event; the text and the cached tokens.
fn generate(
    core: &mut ServingCore,
    toy: &mut Toy,
    request: NewRequest,
) -> Result<(Vec<Token>, u32), Box<dyn Error>> {
    let (mut now, mut emits, mut text) = (0, Vec::new(), Vec::new());
    core.add(request, now);
    loop {
        now += 1_000_000;
        let plan = core.schedule(REPLICA, now).ok_or("nothing to run")?;
        let output = toy.compute(&plan);
        core.complete(REPLICA, plan.id, &output, now);
        core.drain_emits(&mut emits);
        for emit in emits.drain(..) {
            match emit {
                Emit::Started { .. } => {}
                Emit::Tokens { tokens, .. } => text.extend(tokens),
                Emit::Final { usage, .. } => return Ok((text, usage.cached.total())),
            }
        }
    }
}

/// Answers the same prompt twice and returns the cached tokens of both runs.
pub(crate) fn run(out: &mut dyn Write) -> Result<[u32; 2], Box<dyn Error>> {
    let cache = CacheConfig {
        page_tokens: PAGE_TOKENS,
        device_pages: vec![PAGES],
        ..CacheConfig::default()
    };
    let scheduler = SchedulerConfig {
        page_tokens: PAGE_TOKENS,
        ..SchedulerConfig::default()
    };
    let mut core = ServingCore::new(CoreConfig::new(cache, scheduler))?;
    let mut toy = Toy {
        kv: vec![0; ((PAGES + 1) * PAGE_TOKENS) as usize],
    };
    let ns = core.namespace(&NamespaceKey::default())?;
    let request = NewRequest::new(ns, (100..120).collect(), 8);
    let (cold, cached_cold) = generate(&mut core, &mut toy, request.clone())?;
    let (warm, cached_warm) = generate(&mut core, &mut toy, request)?;
    writeln!(out, "cold: {cold:?} ({cached_cold} tokens from the cache)")?;
    writeln!(out, "warm: {warm:?} ({cached_warm} tokens from the cache)")?;
    core.check()?;
    assert_eq!(cold, warm, "the cache changed the text");
    Ok([cached_cold, cached_warm])
}

#[cfg_attr(test, expect(dead_code, reason = "the test calls `run`"))]
fn main() -> Result<(), Box<dyn Error>> {
    run(&mut std::io::stdout().lock()).map(|_| ())
}
