//! What the engine and its core count, as Prometheus metrics at each scrape. All counters only
//! grow; pages and queue lengths are gauges because they are states, not shares.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use rootstock::RouteStats;
use rootstock::memory::{StoreStats, TierId};
use rootstock::radix::{CacheStats, TierStats};
use rootstock::scheduler::SchedulerStats;
use rootstock_engine::service::{Finished, Histogram, Stats, StepTimes};

use crate::chat::ahead::AheadStats;
use crate::kv_events::publisher::PublisherState;

/// Writes all of it.
///
/// # Errors
/// When the text cannot be written.
pub(crate) fn encode(
    mut to: DescriptorEncoder<'_>,
    stats: &Stats,
    ahead: &AheadStats,
    publisher: Option<&PublisherState>,
) -> Result<(), fmt::Error> {
    let to = &mut to;
    if let Some(publisher) = publisher {
        kv_events(to, publisher)?;
    }
    speculative(to, ahead)?;
    counter(to, "steps", "Steps computed", stats.steps)?;
    counter(
        to,
        "steps_failed",
        "Steps that failed or panicked",
        stats.steps_failed,
    )?;
    let help = "Tokens put through the model, recomputation included";
    counter(to, "computed_tokens", help, stats.computed_tokens)?;
    counter(
        to,
        "deferred_requests",
        "Requests refused for a full queue",
        stats.deferred,
    )?;
    let help = "Recounts of all pages while idle that did not add up";
    counter(to, "idle_breaches", help, stats.idle_breaches)?;
    step_times(to, &stats.step_s)?;
    ends(to, &stats.finished)?;
    let Some(core) = &stats.core else {
        return Ok(());
    };
    schedulers(to, &core.schedulers)?;
    routes(to, &core.routes)?;
    tiers(to, &core.cache)?;
    evictions(to, &core.cache, stats.store.as_ref())?;
    if let Some(store) = &stats.store {
        storage(to, store)?;
    }
    pins_and_copies(to, &core.cache)
}

/// Prefixes that come up from lower tiers.
fn fetches(to: &mut DescriptorEncoder<'_>, all: &[SchedulerStats]) -> Result<(), fmt::Error> {
    let sum = |of: fn(&SchedulerStats) -> u64| -> u64 { all.iter().map(of).sum() };
    let help = "Prompts whose prefix came up from a lower tier";
    counter(to, "fetches", help, sum(|stats| stats.fetches))?;
    let help = "Tokens that came up so";
    counter(
        to,
        "fetched_tokens",
        help,
        sum(|stats| stats.fetched_tokens),
    )?;
    let help = "Of those prompts, such as began to compute before it was there";
    counter(
        to,
        "begun_in_transit",
        help,
        sum(|stats| stats.begun_in_transit),
    )?;
    let help = "Of those prompts, such as got less than they should";
    counter(
        to,
        "fetches_failed",
        help,
        sum(|stats| stats.fetches_failed),
    )
}

/// Steps and requests of all replicas' schedulers together.
fn schedulers(to: &mut DescriptorEncoder<'_>, all: &[SchedulerStats]) -> Result<(), fmt::Error> {
    let sum = |of: fn(&SchedulerStats) -> u64| -> u64 { all.iter().map(of).sum() };
    let help = "Times a request gave way to another";
    counter(to, "preemptions", help, sum(|stats| stats.preemptions))?;
    let help = "Steps kept short for requests with a latency_sensitivity";
    counter(to, "steps_hurried", help, sum(|stats| stats.hurried_steps))?;
    let help = "Of those, run in the middle of another step";
    counter(
        to,
        "steps_overtaking",
        help,
        sum(|stats| stats.overtaking_steps),
    )?;
    let help = "Tokens taken over from requests that computed them meanwhile";
    counter(to, "shared_tokens", help, sum(|stats| stats.shared_tokens))?;
    let help = "Tokens guessed from the text of their request and verified";
    counter(
        to,
        "guessed_tokens",
        help,
        sum(|stats| stats.guessed_tokens),
    )?;
    let help = "Of those, right ones";
    counter(to, "right_guesses", help, sum(|stats| stats.right_guesses))?;
    let help = "Pins asked for by requests whose prompt was cached";
    counter(to, "pins_asked", help, sum(|stats| stats.pins_asked))?;
    let help = "Of those, not or not wholly granted";
    counter(to, "pins_cut", help, sum(|stats| stats.pins_cut))?;
    fetches(to, all)?;
    let help = "Requests waiting for a seat";
    gauge(
        to,
        "waiting_requests",
        help,
        sum(|stats| stats.waiting.into()),
    )?;
    let help = "Requests with a seat";
    gauge(
        to,
        "running_requests",
        help,
        sum(|stats| stats.running.into()),
    )?;
    let help = "Waiting requests that the router has no replica for yet";
    gauge(
        to,
        "parked_requests",
        help,
        sum(|stats| stats.parked.into()),
    )?;
    Ok(())
}

/// The store: pages asked of it by what came of that, and what it holds.
fn storage(to: &mut DescriptorEncoder<'_>, store: &StoreStats) -> Result<(), fmt::Error> {
    let results = [
        ("ok", store.read),
        ("missing", store.missing),
        ("corrupt", store.corrupt),
        ("truncated", store.truncated),
        ("foreign", store.foreign),
    ];
    let help = "Pages asked of the store, by what came of it; all but ok are misses";
    let counter_type = ConstCounter::new(0_u64).metric_type();
    let mut family = to.encode_descriptor("storage_reads", help, None, counter_type)?;
    for (result, pages) in results {
        let labels = [("result", result)];
        ConstCounter::new(pages).encode(family.encode_family(&labels)?)?;
    }
    let help = "Pages written to the store";
    counter(to, "storage_written_pages", help, store.written)?;
    let help = "Pages evicted from the store for its quota";
    counter(to, "storage_evicted_pages", help, store.evicted)?;
    let help = "Requests that the store refused";
    counter(to, "storage_errors", help, store.errors)?;
    let help = "Requests that the store did not answer in time";
    counter(to, "storage_timeouts", help, store.timeouts)?;
    let help = "Bytes in the store, as far as this server knows";
    gauge(to, "storage_bytes", help, store.bytes)
}

/// Why requests left the engine.
fn ends(to: &mut DescriptorEncoder<'_>, finished: &Finished) -> Result<(), fmt::Error> {
    let reasons = [
        ("stop", finished.stop + finished.stop_string),
        ("length", finished.length),
        ("aborted", finished.aborted),
        ("failed", finished.failed),
        ("queue_timeout", finished.expired),
        ("pushed_out", finished.pushed_out),
    ];
    let help = "Requests that left the engine, by reason";
    let counter_type = ConstCounter::new(0_u64).metric_type();
    let mut family = to.encode_descriptor("engine_ends", help, None, counter_type)?;
    for (reason, requests) in reasons {
        ConstCounter::new(requests).encode(family.encode_family(&[("reason", reason)])?)?;
    }
    Ok(())
}

/// Pages that left a tier, by why: for room, with a request that ended as ephemeral, or for the
/// store's quota.
fn evictions(
    to: &mut DescriptorEncoder<'_>,
    cache: &CacheStats,
    store: Option<&StoreStats>,
) -> Result<(), fmt::Error> {
    let help = "KV pages that left a tier, by reason";
    let counter_type = ConstCounter::new(0_u64).metric_type();
    let mut family = to.encode_descriptor("evictions", help, None, counter_type)?;
    let quota = store.map(|store| (TierId::Storage, "quota", store.evicted));
    let of_tier = |tier: &TierStats| {
        [
            (tier.tier, "room", tier.evicted_pages),
            (tier.tier, "ephemeral", tier.dropped_pages),
        ]
    };
    let memory = cache
        .tiers
        .iter()
        .filter(|tier| tier.tier != TierId::Storage);
    for (tier, reason, pages) in memory.flat_map(of_tier).chain(quota) {
        let replica = replica(tier);
        let tier = ("tier", tier_name(tier));
        let labels = [tier, ("replica", &replica), ("reason", reason)];
        ConstCounter::new(pages).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

/// How requests found their replica.
fn routes(to: &mut DescriptorEncoder<'_>, stats: &RouteStats) -> Result<(), fmt::Error> {
    let help = "Requests placed by the router, by reason";
    let counter_type = ConstCounter::new(0_u64).metric_type();
    let mut family = to.encode_descriptor("routed_requests", help, None, counter_type)?;
    let reasons = [
        ("cost", stats.by_cost),
        ("affinity", stats.by_affinity),
        ("idle", stats.to_idle),
        ("taken_over", stats.moved),
    ];
    for (reason, value) in reasons {
        ConstCounter::new(value).encode(family.encode_family(&[("reason", reason)])?)?;
    }
    let help = "Requests that had to wait for a replica below the queue threshold";
    counter(to, "router_parked_requests", help, stats.parked)?;
    let help = "Requests refused because every replica was over a limit";
    counter(to, "router_refused_requests", help, stats.overloaded)
}

/// Speculative prefill.
fn speculative(to: &mut DescriptorEncoder<'_>, ahead: &AheadStats) -> Result<(), fmt::Error> {
    let help = "Prompts computed ahead of their turn";
    counter(to, "speculative_requests", help, ahead.started)?;
    let help = "Turns whose next prompt was cached already, so that nothing was computed ahead";
    counter(to, "speculative_cached_already", help, ahead.cached_already)?;
    let help = "Turns that wanted the next prompt computed ahead and went without";
    counter(to, "speculative_skipped", help, ahead.skipped)?;
    let help = "Prompts computed ahead that were cut short by their turn or by client work";
    counter(to, "speculative_cancelled", help, ahead.cancelled)?;
    let help = "Tokens computed ahead";
    counter(to, "speculative_warmed_tokens", help, ahead.warmed_tokens)?;
    let help = "Tokens computed ahead that their turn found";
    counter(to, "speculative_used_tokens", help, ahead.used_tokens)?;
    let help = "Tokens computed ahead that were never found, or whose turn came too early";
    counter(to, "speculative_wasted_tokens", help, ahead.wasted_tokens)
}

fn kv_events(to: &mut DescriptorEncoder<'_>, state: &PublisherState) -> Result<(), fmt::Error> {
    counter(to, "kv_events", "KV events published", state.events)?;
    let messages = state.ring.next - state.incarnation;
    counter(to, "kv_event_messages", "Messages of KV events", messages)?;
    let help = "Messages of KV events that slow subscribers missed";
    counter(to, "kv_event_messages_missed", help, state.skipped)?;
    let help = "Requests for old messages of KV events";
    counter(to, "kv_event_replays", help, state.replays)?;
    let help = "Times that all cached pages were announced again";
    counter(to, "kv_event_snapshots", help, state.accounts)?;
    gauge(
        to,
        "kv_event_subscribers",
        "Subscribers to KV events",
        state.subscribers,
    )?;
    let help = "Bytes of KV events kept for replay";
    gauge(to, "kv_event_bytes", help, state.ring.bytes as u64)
}

/// A counter of a tier.
type TierCounter = (&'static str, &'static str, fn(&TierStats) -> u64);

const TIER_COUNTERS: [TierCounter; 3] = [
    ("evicted_pages", "KV pages evicted for room", |tier| {
        tier.evicted_pages
    }),
    (
        "dropped_pages",
        "KV pages dropped as of no further use",
        |tier| tier.dropped_pages,
    ),
    (
        "hit_tokens",
        "Tokens that lookups found in a tier",
        |tier| tier.hit_tokens,
    ),
];

/// Tiers: one label set for all, with `replica` empty where the replicas share the tier.
fn tiers(to: &mut DescriptorEncoder<'_>, cache: &CacheStats) -> Result<(), fmt::Error> {
    let counter_type = ConstCounter::new(0_u64).metric_type();
    for (name, help, value) in TIER_COUNTERS {
        let mut family = to.encode_descriptor(name, help, None, counter_type)?;
        for tier in &cache.tiers {
            let replica = replica(tier.tier);
            let labels = [("tier", tier_name(tier.tier)), ("replica", &replica)];
            ConstCounter::new(value(tier)).encode(family.encode_family(&labels)?)?;
        }
    }
    let help = "KV pages by tier and state";
    let mut family = to.encode_descriptor("kv_pages", help, None, MetricType::Gauge)?;
    for tier in &cache.tiers {
        let states = [
            ("free", tier.free),
            ("evictable", tier.evictable),
            ("leased", tier.leased),
            ("held", tier.held),
            ("in_transit", tier.in_transit),
        ];
        let replica = replica(tier.tier);
        for (state, pages) in states {
            let tier = ("tier", tier_name(tier.tier));
            let labels = [tier, ("replica", &replica), ("state", state)];
            ConstGauge::new(i64::from(pages)).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

/// Pins and copies between tiers.
fn pins_and_copies(to: &mut DescriptorEncoder<'_>, cache: &CacheStats) -> Result<(), fmt::Error> {
    let help = "Distinct KV pages that pins keep";
    gauge(to, "pinned_pages", help, cache.pinned_pages.into())?;
    let help = "Most KV pages that pins may keep";
    gauge(to, "pin_budget_pages", help, cache.pin_budget_pages.into())?;
    let help = "Pins that gave way before their time, when nothing else was left";
    counter(to, "pins_yielded", help, cache.pins_yielded)?;
    let help = "KV pages copied between tiers, by direction";
    let counter_type = ConstCounter::new(0_u64).metric_type();
    let mut family = to.encode_descriptor("copied_pages", help, None, counter_type)?;
    let copied = [
        ("down", cache.copied_down_pages),
        ("up", cache.copied_up_pages),
    ];
    for (direction, pages) in copied {
        ConstCounter::new(pages).encode(family.encode_family(&[("direction", direction)])?)?;
    }
    let help = "Programs whose prefix was brought up before they were expected";
    counter(to, "prefetched_programs", help, cache.returns.programs)?;
    let help = "KV pages of it";
    counter(to, "prefetched_pages", help, cache.returns.pages)?;
    let help = "Times it was left out because requests needed the memory";
    counter(to, "prefetches_left_out", help, cache.returns.pressed)?;
    gauge(to, "programs", "Programs known", cache.programs.into())?;
    gauge(to, "nodes", "Nodes of the tree", cache.nodes.into())?;
    let help = "Copies between tiers that are not acknowledged";
    gauge(to, "copies_under_way", help, cache.copies_under_way.into())?;
    let help = "Copies between tiers that failed; their pages count as not copied";
    counter(to, "copies_failed", help, cache.copies_failed)
}

fn replica(tier: TierId) -> String {
    match tier {
        TierId::Device(replica) => replica.0.to_string(),
        TierId::Host | TierId::Storage => String::new(),
    }
}

fn tier_name(tier: TierId) -> &'static str {
    match tier {
        TierId::Device(_) => "device",
        TierId::Host => "host",
        TierId::Storage => "storage",
    }
}

fn counter(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: u64,
) -> Result<(), fmt::Error> {
    let counter = ConstCounter::new(value);
    counter.encode(to.encode_descriptor(name, help, None, counter.metric_type())?)
}

fn gauge(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: u64,
) -> Result<(), fmt::Error> {
    let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
    gauge.encode(to.encode_descriptor(name, help, None, gauge.metric_type())?)
}

/// Time of a step in the backend, by what it computed.
fn step_times(to: &mut DescriptorEncoder<'_>, times: &StepTimes) -> Result<(), fmt::Error> {
    let help = "Time of a step in the backend, by what it computed";
    let mut family = to.encode_descriptor("step_seconds", help, None, MetricType::Histogram)?;
    for (class, values) in times.all() {
        let bounds = Histogram::bounds_s().iter().copied().chain([f64::MAX]);
        let buckets: Vec<(f64, u64)> = bounds.zip(values.counts().iter().copied()).collect();
        let labels = [("class", class.name())];
        let mut encoder = family.encode_family(&labels)?;
        let (sum, count) = (values.sum_s(), values.count());
        encoder.encode_histogram::<[(&str, &str); 0]>(sum, count, &buckets, None)?;
    }
    Ok(())
}
