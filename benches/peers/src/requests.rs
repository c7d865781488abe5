//! Whole requests of a workload: match with lock and page ids, room for prompt and answer,
//! insertion at the end, unlock. The peers take turns; the median of the runs counts.

use std::time::Duration;

use rootstock_benches::drive::{now, since};
use rootstock_benches::workload::{Op, Workload};

use crate::peer::Peer;
use crate::record::Record;

/// A workload and where it runs.
pub(crate) struct Case<'a> {
    pub(crate) name: &'a str,
    pub(crate) workload: &'a Workload,
    pub(crate) page_tokens: u32,
    pub(crate) capacity_tokens: u32,
    pub(crate) runs: usize,
}

/// One peer over a workload, whichever it is.
pub(crate) struct Runs {
    run: fn(&Case<'_>) -> (f64, f64),
    record: fn(&Case<'_>, &mut [f64], f64) -> Option<Record>,
    values: Vec<f64>,
    hit_ratio: f64,
}

impl Runs {
    pub(crate) fn of<P: Peer>() -> Self {
        Self {
            run: drive::<P>,
            record: |case, values, hit_ratio| {
                let record = Record::of::<P>(case.name, "ns/request", values)?;
                let mut record = record.at(case.page_tokens, 0);
                record.hit_ratio = Some(hit_ratio);
                Some(record)
            },
            values: Vec::new(),
            hit_ratio: 0.0,
        }
    }
}

/// Runs all peers in turn.
pub(crate) fn run(case: &Case<'_>, mut peers: Vec<Runs>) -> std::io::Result<()> {
    for _ in 0..case.runs {
        for peer in &mut peers {
            let (ns, hit_ratio) = (peer.run)(case);
            peer.values.push(ns);
            peer.hit_ratio = hit_ratio;
        }
    }
    let mut records = peers
        .iter_mut()
        .filter_map(|peer| (peer.record)(case, &mut peer.values, peer.hit_ratio));
    records.try_for_each(|record| record.print())
}

/// Nanoseconds a request and the part of the prompt tokens found.
fn drive<P: Peer>(case: &Case<'_>) -> (f64, f64) {
    let page_tokens = case.page_tokens;
    let mut peer = P::new(page_tokens, case.capacity_tokens / page_tokens);
    let requests = &case.workload.requests;
    let mut running: Vec<Option<P::Held>> = requests.iter().map(|_| None).collect();
    let (mut tokens, mut pages) = (Vec::new(), Vec::new());
    let (mut spent, mut hits, clock) = (Duration::ZERO, 0_u64, clock_cost());
    for op in &case.workload.ops {
        let (Op::Begin(at) | Op::Finish(at)) = *op;
        let request = &requests[at as usize];
        tokens.clear();
        pages.clear();
        request.tokens(&mut tokens);
        let whole = (request.total_len / page_tokens * page_tokens) as usize;
        let place = &mut running[at as usize];
        let begin = now();
        match op {
            Op::Begin(_) => {
                let mut held = peer.begin(&tokens[..request.prompt_len as usize], &mut pages);
                let found = P::found(&held);
                hits += u64::from(found);
                let missing = (request.total_len - found) / page_tokens;
                if missing == 0 || peer.take(&mut held, missing) {
                    *place = Some(held);
                } else {
                    peer.end(held);
                }
            }
            Op::Finish(_) => {
                if let Some(mut held) = place.take() {
                    peer.insert(&mut held, &tokens[..whole]);
                    peer.end(held);
                }
            }
        }
        spent += since(begin).saturating_sub(clock);
    }
    running
        .into_iter()
        .flatten()
        .for_each(|held| peer.end(held));
    let ratio = hits as f64 / case.workload.prompt_tokens() as f64;
    (spent.as_nanos() as f64 / requests.len() as f64, ratio)
}

/// What two looks at the clock add to a span: the median of many.
fn clock_cost() -> Duration {
    let mut looks: Vec<Duration> = (0..1001).map(|_| since(now())).collect();
    looks.sort_unstable();
    looks[looks.len() / 2]
}
