//! A host that owns its KV: plans are data, the host translates them to its own arrays.
//!
//! This host keeps KV layer-first, as many engines do, and its forward pass takes a block table
//! and a slot mapping. Nothing of Rootstock touches the bytes; no trait is implemented. Agents that
//! share a system prompt are served together. `cargo run -p rootstock --example own_kv`
#![expect(
    clippy::cast_possible_truncation,
    reason = "the numbers of an example are small"
)]

use std::error::Error;
use std::io::Write;

use rootstock::memory::ReplicaId;
use rootstock::radix::{CacheConfig, Hints, NamespaceId, NamespaceKey, Token};
use rootstock::scheduler::{Admission, Emit, NewRequest, RowOut};
use rootstock::scheduler::{SchedulerConfig, StepOutput, StepPlan};
use rootstock::{CoreConfig, Limits, RouterConfig, ServingCore};

const LAYERS: usize = 2;
const BLOCK: usize = 4;
const BLOCKS: usize = 16;

/// The host's model: one number per slot and layer.
struct HostModel {
    kv: [Vec<u32>; LAYERS],
}

/// What the host's forward pass takes for one sequence.
struct HostInput<'a> {
    tokens: &'a [Token],
    /// Where each token's KV goes.
    slot_mapping: Vec<usize>,
    /// Blocks of the whole context, in order.
    block_table: Vec<usize>,
    context: usize,
}

impl HostModel {
    fn forward(&mut self, input: &HostInput<'_>) -> Token {
        for (layer, kv) in self.kv.iter_mut().enumerate() {
            for (slot, token) in input.slot_mapping.iter().zip(input.tokens) {
                kv[*slot] = token.wrapping_mul(layer as u32 + 3);
            }
        }
        let read = |kv: &Vec<u32>, p: usize| kv[input.block_table[p / BLOCK] * BLOCK + p % BLOCK];
        let sums = self
            .kv
            .iter()
            .map(|kv| (0..input.context).map(|p| read(kv, p)).sum::<u32>());
        sums.fold(1, |hash, sum| (hash ^ sum).wrapping_mul(0x0100_0193)) % 500
    }

    /// Translates and computes one plan, row by row.
    fn run(&mut self, plan: &StepPlan) -> StepOutput {
        let mut output = StepOutput::default();
        for row in &plan.rows {
            let block_table: Vec<usize> = plan
                .row_pages(row)
                .iter()
                .map(|page| page.index())
                .collect();
            let first = row.first_pos as usize;
            let context = first + row.len as usize;
            let slot = |p: usize| block_table[p / BLOCK] * BLOCK + p % BLOCK;
            let slot_mapping = (first..context).map(slot).collect();
            let tokens = plan.row_tokens(row);
            let next = self.forward(&HostInput {
                tokens,
                slot_mapping,
                block_table,
                context,
            });
            let mut out = RowOut::default();
            if row.sample.is_some() {
                out.accepted.push(next);
            }
            output.rows.push(out);
        }
        output
    }
}

fn request(ns: NamespaceId, label: u64, question: Token) -> NewRequest {
    let system = 1..=12;
    NewRequest {
        hints: Hints {
            priority: 3,
            ..Hints::default()
        },
        label,
        ..NewRequest::new(ns, system.chain([question, question + 1]).collect(), 6)
    }
}

/// Label, text and cached tokens of a request that finished.
type Finished = (u64, Vec<Token>, u32);

/// Serves the requests together; returns them as they finish.
fn serve(
    core: &mut ServingCore,
    host: &mut HostModel,
    requests: Vec<NewRequest>,
) -> Result<Vec<Finished>, Box<dyn Error>> {
    let (mut now, mut emits) = (0, Vec::new());
    let mut texts = vec![Vec::new(); requests.len()];
    let mut finished = Vec::new();
    for request in requests {
        match core.add(request, now) {
            Admission::Admitted(_) => {}
            Admission::Deferred { .. } => return Err("the queue is full".into()),
            Admission::Rejected(reason) => return Err(reason.into()),
        }
    }
    while finished.len() < texts.len() {
        now += 1_000_000;
        let plan = core.schedule(ReplicaId(0), now).ok_or("nothing to run")?;
        let output = host.run(&plan);
        core.complete(ReplicaId(0), plan.id, &output, now);
        core.drain_emits(&mut emits);
        for emit in emits.drain(..) {
            let text = &mut texts[emit.label() as usize];
            match emit {
                Emit::Started { .. } => {}
                Emit::Tokens { tokens, .. } => text.extend(tokens),
                Emit::Final { label, usage, .. } => {
                    finished.push((label, std::mem::take(text), usage.cached.total()));
                }
            }
        }
    }
    Ok(finished)
}

/// Serves two agents, then a third that finds their system prompt; returns its cached tokens.
pub(crate) fn run(out: &mut dyn Write) -> Result<u32, Box<dyn Error>> {
    let page_tokens = BLOCK as u32;
    let device_pages = vec![BLOCKS as u32];
    let cache = CacheConfig {
        page_tokens,
        device_pages,
        ..CacheConfig::default()
    };
    let scheduler = SchedulerConfig {
        page_tokens,
        ..SchedulerConfig::default()
    };
    let mut core = ServingCore::new(CoreConfig {
        cache,
        scheduler,
        limits: Limits::default(),
        router: RouterConfig::default(),
    })?;
    let mut host = HostModel {
        kv: [(); LAYERS].map(|()| vec![0; (BLOCKS + 1) * BLOCK]),
    };
    let ns = NamespaceKey {
        model: "host-model".to_owned(),
        numerics: "host".to_owned(),
        lora: None,
        salt: None,
    };
    let ns = core.namespace(&ns)?;
    let mut finished = serve(
        &mut core,
        &mut host,
        vec![request(ns, 0, 100), request(ns, 1, 200)],
    )?;
    finished.extend(serve(&mut core, &mut host, vec![request(ns, 0, 300)])?);
    for (label, text, cached) in &finished {
        writeln!(
            out,
            "agent {label}: {text:?} ({cached} prompt tokens from the cache)"
        )?;
    }
    core.check()?;
    Ok(finished.last().map_or(0, |(_, _, cached)| *cached))
}

#[cfg_attr(
    test,
    expect(dead_code, reason = "a test includes this file and calls `run`")
)]
fn main() -> Result<(), Box<dyn Error>> {
    run(&mut std::io::stdout().lock()).map(|_| ())
}
