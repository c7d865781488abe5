//! A whole engine in less than two hundred lines: `ServingCore` decides, a toy backend computes.
//!
//! The toy's "KV" of a token is the token itself, written to the slot that the plan names. The
//! next token is a hash of everything read back through the page table: a wrong page would change
//! the text. Run it: `cargo run -p rootstock --example toy_engine`.

use std::error::Error;
use std::io::Write;

use rootstock::memory::{CopyDone, CopyEngine, CopyPlan, KvDtype, KvLayout, LayoutOrder};
use rootstock::memory::{Full, LayoutSpec, ReplicaId, StepId};
use rootstock::radix::{CacheConfig, Hints, NamespaceKey, TenantId, Token};
use rootstock::scheduler::{Class, Emit, NewRequest, RowOut, SamplingParams, SchedulerConfig};
use rootstock::scheduler::{StepOutput, StepPlan};
use rootstock::{Backend, Caps, CoreConfig, Limits, RouterConfig, ServingCore, StepError};

const PAGE_TOKENS: u32 = 4;
const PAGES: u32 = 32;

struct Toy {
    layout: KvLayout,
    kv: Vec<Token>,
    done: Option<(StepId, StepOutput)>,
}

impl Backend for Toy {
    fn caps(&self) -> Caps {
        let numerics_id = "toy".to_owned();
        Caps {
            layout: self.layout,
            numerics_id,
            max_in_flight: 1,
            vocab: 1000,
        }
    }

    fn launch(&mut self, plan: StepPlan) -> Result<(), StepError> {
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
                let hash = seen.fold(7_u32, |hash, token| {
                    (hash ^ token).wrapping_mul(0x0100_0193)
                });
                out.accepted.push(hash % 1000);
            }
            output.rows.push(out);
        }
        self.done = Some((plan.id, output));
        Ok(())
    }

    fn wait(&mut self, step: StepId) -> Result<StepOutput, StepError> {
        let done = self.done.take().filter(|(id, _)| *id == step);
        done.map(|(_, output)| output)
            .ok_or(StepError::NotInFlight { step })
    }

    fn copies(&mut self) -> &mut dyn CopyEngine {
        self // Only the device tier is used here: no copy is ever planned.
    }
}

impl CopyEngine for Toy {
    fn submit(&mut self, plan: CopyPlan) -> Result<(), (CopyPlan, Full)> {
        Err((plan, Full))
    }

    fn poll(&mut self, _: &mut Vec<CopyDone>) {}
}

/// Generates for one prompt until its final event; returns the text and the cached tokens.
fn generate(
    core: &mut ServingCore,
    toy: &mut Toy,
    request: NewRequest,
) -> Result<(Vec<Token>, u32), Box<dyn Error>> {
    let (mut now, mut emits, mut text) = (0, Vec::new(), Vec::new());
    core.add(request, now);
    loop {
        now += 1_000_000;
        let plan = core
            .schedule(ReplicaId(0), now)
            .ok_or("nothing to run, nothing finished")?;
        let step = plan.id;
        match toy.launch(plan).and_then(|()| toy.wait(step)) {
            Ok(output) => core.complete(ReplicaId(0), step, &output, now),
            Err(_) => core.fail_step(ReplicaId(0), step, now),
        }
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
        ..Default::default()
    };
    let scheduler = SchedulerConfig {
        page_tokens: PAGE_TOKENS,
        ..SchedulerConfig::default()
    };
    let mut core = ServingCore::new(CoreConfig {
        cache,
        scheduler,
        limits: Limits::default(),
        router: RouterConfig::default(),
    })?;
    let spec = LayoutSpec {
        order: LayoutOrder::PageFirst,
        page_tokens: PAGE_TOKENS,
        layers: 1,
        kv_heads: 1,
        head_dim: 1,
        dtype: KvDtype::F32,
    };
    let layout = KvLayout::new(spec)?;
    let kv = vec![0; ((PAGES + 1) * PAGE_TOKENS) as usize]; // Page 0 is the scratch page.
    let mut toy = Toy {
        layout,
        kv,
        done: None,
    };
    let numerics = toy.caps().numerics_id;
    let ns = NamespaceKey {
        model: "toy".to_owned(),
        numerics,
        lora: None,
        salt: None,
    };
    let ns = core.namespace(&ns)?;
    let request = NewRequest {
        tenant: TenantId(0),
        ns,
        tokens: (100..120).collect(),
        max_tokens: 8,
        min_tokens: 0,
        stop_tokens: Vec::new(),
        ignore_eos: false,
        sampling: SamplingParams::greedy(),
        hints: Hints::default(),
        class: Class::Client,
        deadline: None,
        label: 1,
    };
    let (cold, cached_cold) = generate(&mut core, &mut toy, request.clone())?;
    let (warm, cached_warm) = generate(&mut core, &mut toy, request)?;
    writeln!(out, "cold: {cold:?} ({cached_cold} tokens from the cache)")?;
    writeln!(out, "warm: {warm:?} ({cached_warm} tokens from the cache)")?;
    core.check()?;
    if cold != warm {
        return Err("the cache changed the text".into());
    }
    Ok([cached_cold, cached_warm])
}

#[cfg_attr(
    test,
    expect(dead_code, reason = "a test includes this file and calls `run`")
)]
fn main() -> Result<(), Box<dyn Error>> {
    run(&mut std::io::stdout().lock()).map(|_| ())
}
