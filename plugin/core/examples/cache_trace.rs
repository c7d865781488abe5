//! Plays a recorded trace of prompts through scheduler and cache, and prints for each line of it
//! what happened: how much was cached, what was evicted, or that it did not fit. Adapters play the
//! same trace, and the lines must be equal (`plugin/python/engines/one_trace.py`).
//!
//! A trace has a line `pages N`, then `begin ID CONTENT...` and `end ID`: each content is a page of
//! 16 tokens, and one more token follows the last. Run it:
//! `cargo run -p rootstock --example cache_trace -- FILE`.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write;

use rootstock::memory::{PageId, ReplicaId};
use rootstock::radix::{CacheConfig, NamespaceId, NamespaceKey, PolicyKind, Token};
use rootstock::scheduler::{
    Admission, Emit, FinishReason, NewRequest, RequestId, RowOut, SchedulerConfig, StepOutput,
};
use rootstock::{CoreConfig, Limits, RouterConfig, ServingCore};

const PAGE_TOKENS: u32 = 16;

struct Player {
    core: ServingCore,
    ns: NamespaceId,
    now: u64,
    /// What the pages hold that are or were handed out.
    contents: BTreeMap<PageId, u32>,
    live: BTreeMap<u32, RequestId>,
}

fn request(ns: NamespaceId, contents: &[u32], label: u32) -> NewRequest {
    let page = |&content: &u32| (0..PAGE_TOKENS).map(move |at| content * PAGE_TOKENS + at + 1);
    let mut tokens: Vec<Token> = contents.iter().flat_map(page).collect();
    tokens.push(0);
    NewRequest {
        ignore_eos: true,
        label: label.into(),
        ..NewRequest::new(ns, tokens, PAGE_TOKENS - 1)
    }
}

impl Player {
    fn new(pages: u32) -> Result<Self, Box<dyn Error>> {
        let mut core = ServingCore::new(CoreConfig {
            cache: CacheConfig {
                page_tokens: PAGE_TOKENS,
                device_pages: vec![pages],
                policy: PolicyKind::Lru,
                ..CacheConfig::default()
            },
            scheduler: SchedulerConfig {
                page_tokens: PAGE_TOKENS,
                step_tokens: 1 << 20,
                max_model_len: 1 << 20,
                preempt_gap: None,
                ..SchedulerConfig::default()
            },
            limits: Limits::default(),
            router: RouterConfig::default(),
        })?;
        let ns = core.namespace(&NamespaceKey::default())?;
        Ok(Self {
            core,
            ns,
            now: 0,
            contents: BTreeMap::new(),
            live: BTreeMap::new(),
        })
    }

    /// One step; how many pages of `contents` were cached for what started in it, and what was
    /// evicted for the rest.
    fn step(&mut self, contents: &[u32]) -> Option<(u32, Vec<u32>)> {
        self.now += 1_000_000;
        let (mut emits, mut gone) = (Vec::new(), Vec::new());
        let plan = self.core.schedule(ReplicaId(0), self.now)?;
        self.core.drain_emits(&mut emits);
        let started = emits.iter().find_map(|emit| match emit {
            Emit::Started {
                request, cached, ..
            } => Some((*request, cached.total() / PAGE_TOKENS)),
            Emit::Tokens { .. } | Emit::Final { .. } => None,
        });
        let mut output = StepOutput::default();
        for row in &plan.rows {
            if let Some((_, cached)) = started.filter(|(request, _)| *request == row.request) {
                let fresh = &plan.row_pages(row)[cached as usize..];
                gone.extend(fresh.iter().filter_map(|page| self.contents.remove(page)));
                let named = fresh.iter().copied().zip(&contents[cached as usize..]);
                self.contents
                    .extend(named.map(|(page, &content)| (page, content)));
            }
            let mut out = RowOut::default();
            if row.sample.is_some() {
                out.accepted.push(1);
            }
            output.rows.push(out);
        }
        self.core.complete(ReplicaId(0), plan.id, &output, self.now);
        self.core.drain_emits(&mut emits);
        gone.sort_unstable();
        started.map(|(_, cached)| (cached, gone))
    }

    fn begin(&mut self, id: u32, contents: &[u32]) -> Result<String, Box<dyn Error>> {
        let admission = self.core.add(request(self.ns, contents, id), self.now);
        let Admission::Admitted(request) = admission else {
            return Err(format!("request {id} was not queued: {admission:?}").into());
        };
        let Some((cached, gone)) = self.step(contents) else {
            self.core.abort(request, self.now);
            self.core.drain_emits(&mut Vec::new());
            return Ok(format!("begin {id} short"));
        };
        self.live.insert(id, request);
        Ok(format!("begin {id} cached {cached} evicted {gone:?}"))
    }

    fn end(&mut self, id: u32) -> String {
        self.now += 1_000_000;
        let Some(request) = self.live.remove(&id) else {
            return format!("end {id} missing");
        };
        self.core.finish(request, FinishReason::Stop, self.now);
        self.core.drain_emits(&mut Vec::new());
        format!("end {id}")
    }
}

/// Plays a trace; one line for each of its lines, the first with how many pages there are.
pub(crate) fn run(trace: &str, out: &mut dyn Write) -> Result<(), Box<dyn Error>> {
    let mut lines = trace.lines();
    let pages = lines.next().and_then(|line| line.strip_prefix("pages "));
    let mut player = Player::new(pages.ok_or("the first line is no `pages N`")?.parse()?)?;
    for line in lines {
        let mut words = line.split(' ');
        let verb = words.next().unwrap_or_default();
        let numbers = words.map(str::parse).collect::<Result<Vec<u32>, _>>()?;
        let said = match (verb, numbers.split_first()) {
            ("begin", Some((&id, contents))) => player.begin(id, contents)?,
            ("end", Some((&id, _))) => player.end(id),
            _ => return Err(format!("`{line}` is no line of a trace").into()),
        };
        writeln!(out, "{said}")?;
        player.core.check()?;
    }
    Ok(())
}

#[cfg_attr(
    test,
    expect(dead_code, reason = "a test includes this file and calls `run`")
)]
fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("which trace?")?;
    run(
        &std::fs::read_to_string(path)?,
        &mut std::io::stdout().lock(),
    )
}
