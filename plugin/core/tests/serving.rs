//! `ServingCore` as hosts drive it: configuration, ids, replicas, isolation, ends.
#![expect(
    clippy::cast_possible_truncation,
    reason = "ids are small in these tests"
)]

use std::collections::BTreeMap;

use rootstock::hints::Ceiling;
use rootstock::memory::{
    CopyDone, Nanos, PageAddress, ReplicaId, StepId, StoreEvent, StoreOp, StorePlan, TierId,
};
use rootstock::radix::{
    CacheConfig, Key, NamespaceId, NamespaceKey, PolicyKind, Token, WritePolicy,
};
use rootstock::scheduler::{
    Admission, Emit, FinishReason, NewRequest, RequestId, RowOut, SchedulerConfig, StepOutput,
    StepPlan,
};
use rootstock::{ConfigError, CoreConfig, Limits, RouterConfig, ServingCore};

const PAGE_TOKENS: u32 = 4;

fn config(device_pages: Vec<u32>) -> CoreConfig {
    let cache = CacheConfig {
        page_tokens: PAGE_TOKENS,
        device_pages,
        ..CacheConfig::default()
    };
    let scheduler = SchedulerConfig {
        page_tokens: PAGE_TOKENS,
        ..SchedulerConfig::default()
    };
    CoreConfig {
        cache,
        scheduler,
        limits: Limits::default(),
        router: RouterConfig::default(),
    }
}

fn core(device_pages: Vec<u32>) -> ServingCore {
    ServingCore::new(config(device_pages)).expect("a sound configuration")
}

fn key(model: &str, lora: Option<&str>, salt: Option<&str>) -> NamespaceKey {
    NamespaceKey {
        model: model.to_owned(),
        numerics: "n".to_owned(),
        lora: lora.map(str::to_owned),
        salt: salt.map(str::to_owned),
    }
}

fn request(ns: NamespaceId, tokens: Vec<Token>, label: u64) -> NewRequest {
    NewRequest {
        label,
        ..NewRequest::new(ns, tokens, 3)
    }
}

fn admit(core: &mut ServingCore, request: NewRequest, now: Nanos) -> RequestId {
    let Admission::Admitted(id) = core.add(request, now) else {
        unreachable!("the queue is never full here");
    };
    id
}

/// The token drawn for a row: a function of its request, so that crossed output is seen.
fn answer(plan: &StepPlan) -> StepOutput {
    let rows = plan.rows.iter().map(|row| {
        let mut out = RowOut::default();
        if row.sample.is_some() {
            out.accepted.push(row.request.0 as Token % 1000);
        }
        out
    });
    StepOutput {
        rows: rows.collect(),
    }
}

#[derive(Debug, Default)]
struct Ended {
    text: Vec<Token>,
    cached: u32,
    finals: Vec<FinishReason>,
}

/// Runs all replicas until nothing is live; what each request heard, by its id.
fn run(core: &mut ServingCore, mut now: Nanos) -> BTreeMap<RequestId, Ended> {
    let mut heard: BTreeMap<RequestId, Ended> = BTreeMap::new();
    let mut emits = Vec::new();
    for _ in 0..10_000 {
        for index in 0..core.config().replicas() {
            let replica = ReplicaId(index as u16);
            now += 1_000_000;
            if let Some(plan) = core.schedule(replica, now) {
                let output = answer(&plan);
                core.complete(replica, plan.id, &output, now);
            }
        }
        core.check().expect("everything adds up");
        core.drain_emits(&mut emits);
        for emit in emits.drain(..) {
            let ended = heard.entry(emit.request()).or_default();
            assert!(ended.finals.is_empty(), "an event after the final one");
            match emit {
                Emit::Started { cached, .. } => ended.cached = cached.total(),
                Emit::Tokens { tokens, .. } => ended.text.extend(tokens),
                Emit::Final { reason, .. } => ended.finals.push(reason),
            }
        }
        if core.is_idle() {
            core.check_idle().expect("nothing in use");
            return heard;
        }
    }
    unreachable!("the load never goes idle");
}

#[test]
fn refused_configurations_say_which_value_and_what_is_possible() {
    let refusal = |change: fn(&mut CoreConfig)| {
        let mut config = config(vec![8]);
        change(&mut config);
        ServingCore::new(config).expect_err("refused").to_string()
    };
    let text = refusal(|config| config.cache.page_tokens = 16);
    assert!(
        text.contains("scheduler.page_tokens is 4 and cache.page_tokens is 16"),
        "{text}"
    );
    let text = refusal(|config| {
        config.cache.page_tokens = 0;
        config.scheduler.page_tokens = 0;
    });
    assert!(text.contains("page_tokens is 0"), "{text}");
    let text = refusal(|config| config.cache.device_pages.clear());
    assert!(text.contains("0 entries; 1 to 256 replicas"), "{text}");
    let text = refusal(|config| config.cache.device_pages = vec![1; 300]);
    assert!(text.contains("300 entries"), "{text}");
    let text = refusal(|config| config.cache.device_pages = vec![0]);
    assert!(
        text.starts_with("cache: ") && text.contains("device_pages"),
        "{text}"
    );
    let text = refusal(|config| config.scheduler.max_running = 0);
    assert!(text.starts_with("scheduler: max_running is 0"), "{text}");
    let text = refusal(|config| config.limits.ceiling.jump_s = f64::NAN);
    assert!(text.contains("jump_s"), "{text}");
    let error = ServingCore::new(config(vec![])).expect_err("refused");
    assert!(matches!(error, ConfigError::Replicas { replicas: 0, .. }));
}

/// The policy in force is that of the server and of the Python package, unless a host says another.
#[test]
fn a_cache_that_nobody_told_otherwise_learns() {
    assert_eq!(CacheConfig::default().policy, PolicyKind::Agent);
    let read: CacheConfig = serde_json::from_str(r#"{"page_tokens": 4}"#).expect("a cache");
    assert_eq!(read.policy, PolicyKind::Agent);
    assert!(core(vec![8]).stats().cache.duel.is_some(), "it is at work");
}

#[test]
fn a_label_is_no_key() {
    let mut core = core(vec![32]);
    let ns = core.namespace(&key("m", None, None)).expect("a namespace");
    let first = admit(&mut core, request(ns, (0..9).collect(), 7), 1);
    let second = admit(&mut core, request(ns, (20..29).collect(), 7), 1);
    assert!(core.abort(first, 2));
    let third = admit(&mut core, request(ns, (0..9).collect(), 7), 3);
    let heard = run(&mut core, 4);
    assert_eq!(heard[&first].finals, [FinishReason::Aborted]);
    for id in [second, third] {
        assert_eq!(heard[&id].finals, [FinishReason::Length]);
        assert_eq!(
            heard[&id].text,
            [id.0 as Token % 1000; 3],
            "no crossed output"
        );
    }
}

#[test]
fn each_part_of_a_namespace_keeps_its_own_kv() {
    let mut core = core(vec![64]);
    let keys = [
        key("a", None, None),
        key("m", None, None),
        key("m", None, Some("a")),
        key("m", Some("a"), None),
        key("m", Some("a"), Some("a")),
        NamespaceKey {
            numerics: "a".to_owned(),
            ..key("m", None, None)
        },
    ];
    let prompt: Vec<Token> = (0..17).collect();
    let mut now = 1;
    let mut serve = |core: &mut ServingCore, key: &NamespaceKey| {
        let ns = core.namespace(key).expect("a namespace");
        now += 1_000_000_000;
        let id = admit(core, request(ns, prompt.clone(), 0), now);
        run(core, now)[&id].cached
    };
    for key in &keys {
        assert_eq!(serve(&mut core, key), 0, "{key:?} finds nobody else's KV");
    }
    for key in &keys {
        assert_eq!(serve(&mut core, key), 16, "{key:?} finds its own");
    }
}

#[test]
fn a_caller_cannot_raise_its_priority_above_the_ceiling() {
    let first_served = |ceiling: Ceiling| {
        let mut config = config(vec![32]);
        config.scheduler.max_running = 1;
        config.scheduler.preempt_gap = None;
        config.limits.ceiling = ceiling;
        let mut core = ServingCore::new(config).expect("a sound configuration");
        let ns = core.namespace(&key("m", None, None)).expect("a namespace");
        admit(&mut core, request(ns, (0..9).collect(), 0), 1);
        let mut greedy = request(ns, (20..29).collect(), 1);
        greedy.hints.priority = i32::MAX;
        greedy.hints.strict = u32::MAX;
        greedy.hints.jump_s = 1e300;
        admit(&mut core, greedy, 2);
        let plan = core.schedule(ReplicaId(0), 3).expect("a plan");
        plan.row_tokens(&plan.rows[0])[0]
    };
    assert_eq!(
        first_served(Ceiling::default()),
        20,
        "without a ceiling the later one jumps"
    );
    let ceiling = Ceiling {
        priority: 0,
        strict: 0,
        jump_s: 0.0,
        ..Ceiling::default()
    };
    assert_eq!(first_served(ceiling), 0, "with one it keeps its place");
}

#[test]
fn replicas_share_the_ids_and_follow_prefix_and_load() {
    let mut core = core(vec![32, 32, 32]);
    let ns = core.namespace(&key("m", None, None)).expect("a namespace");
    let prompts: Vec<Vec<Token>> = (0..3).map(|n| (n * 50..n * 50 + 21).collect()).collect();
    let ids: Vec<RequestId> = prompts
        .iter()
        .enumerate()
        .map(|(label, prompt)| admit(&mut core, request(ns, prompt.clone(), label as u64), 1))
        .collect();
    let homes: Vec<ReplicaId> = ids.iter().map(|id| id.replica()).collect();
    assert_eq!(
        homes,
        [ReplicaId(0), ReplicaId(1), ReplicaId(2)],
        "an idle replica takes it"
    );
    let heard = run(&mut core, 2);
    assert!(
        ids.iter()
            .all(|id| heard[id].finals == [FinishReason::Length])
    );
    // Warm: each goes where its prefix is.
    for (prompt, home) in prompts.iter().zip(&homes) {
        let id = admit(&mut core, request(ns, prompt.clone(), 0), 3_000_000_000);
        assert_eq!(id.replica(), *home);
        assert_eq!(run(&mut core, 3_000_000_001)[&id].cached, 20);
    }
}

#[test]
fn unknown_ids_change_nothing() {
    let mut core = core(vec![16]);
    let ns = core.namespace(&key("m", None, None)).expect("a namespace");
    let known = admit(&mut core, request(ns, (0..9).collect(), 0), 1);
    for id in [RequestId(0), RequestId(u64::MAX), RequestId(known.0 + 1)] {
        assert!(!core.abort(id, 2));
        assert!(!core.finish(id, FinishReason::StopString, 2));
    }
    for replica in [ReplicaId(0), ReplicaId(9)] {
        core.complete(replica, StepId(77), &StepOutput::default(), 2);
        core.fail_step(replica, StepId(0), 2);
    }
    assert!(core.schedule(ReplicaId(9), 2).is_none());
    core.check().expect("everything adds up");
    assert_eq!(run(&mut core, 3)[&known].finals, [FinishReason::Length]);
    assert!(!core.abort(known, 4), "an ended request ends once");
}

#[test]
fn ending_everything_gives_each_request_its_final_event_and_all_pages_back() {
    let mut core = core(vec![32]);
    let ns = core.namespace(&key("m", None, None)).expect("a namespace");
    for n in 0..4 {
        admit(
            &mut core,
            request(ns, (n * 20..n * 20 + 9).collect(), u64::from(n)),
            1,
        );
    }
    let plan = core.schedule(ReplicaId(0), 2).expect("a plan");
    core.end_all(3);
    core.complete(ReplicaId(0), plan.id, &answer(&plan), 4);
    let mut emits = Vec::new();
    core.drain_emits(&mut emits);
    let finals: Vec<&Emit> = emits
        .iter()
        .filter(|emit| matches!(emit, Emit::Final { .. }))
        .collect();
    assert_eq!(finals.len(), 4);
    assert!(
        matches!(emits.last(), Some(Emit::Final { .. })),
        "nothing after the ends"
    );
    assert!(core.is_idle());
    core.check_idle().expect("nothing in use");
    // What was computed counts only when its result came: nothing of the given-up step matches.
    assert_eq!(core.stats().cache.tiers[0].evictable, 0);
}

#[test]
fn a_core_may_be_dropped_with_requests_running() {
    let mut core = core(vec![32, 32]);
    let ns = core.namespace(&key("m", None, None)).expect("a namespace");
    for n in 0..6 {
        admit(&mut core, request(ns, (n * 20..n * 20 + 9).collect(), 0), 1);
    }
    let plan = core.schedule(ReplicaId(0), 2).expect("a plan");
    core.complete(ReplicaId(0), plan.id, &answer(&plan), 3);
    assert!(core.schedule(ReplicaId(0), 4).is_some());
    drop(core); // Leases and pages that are dropped unreturned panic in debug builds.
}

#[test]
fn a_flush_empties_everything_or_changes_nothing() {
    let mut core = core(vec![32]);
    let ns = core.namespace(&key("m", None, None)).expect("a namespace");
    let prompt: Vec<Token> = (0..9).collect();
    admit(&mut core, request(ns, prompt.clone(), 0), 1);
    run(&mut core, 2);
    let running = admit(&mut core, request(ns, prompt.clone(), 0), 1_000_000_000);
    assert!(core.schedule(ReplicaId(0), 1_000_000_001).is_some());
    core.flush(1_000_000_002)
        .expect_err("refused while a request runs");
    assert!(core.stats().cache.tiers[0].leased > 0);
    assert!(core.abort(running, 1_000_000_003));
    core.end_all(1_000_000_004);
    core.flush(1_000_000_005).expect("idle");
    core.check_idle().expect("nothing in use");
    let tier = core.stats().cache.tiers[0];
    assert_eq!((tier.free, tier.evictable), (tier.total, 0));
}

#[test]
fn copies_that_the_cache_begins_by_itself_come_out_with_the_next_plan() {
    let mut config = config(vec![32]);
    config.cache.host_pages = 32;
    config.cache.write_policy = WritePolicy::Through;
    let mut core = ServingCore::new(config).expect("a sound configuration");
    let ns = core.namespace(&key("m", None, None)).expect("a namespace");
    let (mut now, mut copied) = (1, 0);
    // What the first computed goes to host when it ends, with a plan of the second.
    for first in [0, 100] {
        admit(
            &mut core,
            request(ns, (first..first + 17).collect(), 0),
            now,
        );
        while !core.is_idle() {
            now += 1_000_000;
            let plan = core.schedule(ReplicaId(0), now).expect("work is left");
            for copy in &plan.copies {
                assert_eq!(
                    (copy.from.0, copy.to.0),
                    (TierId::Device(ReplicaId(0)), TierId::Host)
                );
                copied += copy.to.1.len();
                core.copy_done(
                    CopyDone {
                        id: copy.id,
                        ok: true,
                    },
                    now,
                );
            }
            let output = answer(&plan);
            core.complete(ReplicaId(0), plan.id, &output, now);
            core.check().expect("everything adds up");
        }
    }
    assert_eq!(copied, 4, "the complete pages of the first");
    let host = core.stats().cache.tiers.pop().expect("a host tier");
    assert_eq!((host.tier, host.evictable), (TierId::Host, 4));
    core.check_idle()
        .expect("nothing in use but what the copies of the second hold");
}

fn with_storage() -> ServingCore {
    with_storage_and_seats(64)
}

fn with_storage_and_seats(seats: u32) -> ServingCore {
    let mut config = config(vec![16]);
    config.scheduler.max_running = seats;
    config.cache.host_pages = 16;
    config.cache.storage_pages = 64;
    config.cache.write_policy = WritePolicy::Through;
    ServingCore::new(config).expect("a sound configuration")
}

fn store_plans(core: &mut ServingCore) -> Vec<StorePlan> {
    let mut plans = Vec::new();
    core.drain_store(&mut plans);
    plans
}

fn stored(core: &mut ServingCore, plan: &StorePlan, ok: bool) {
    let pages = vec![ok; plan.pages.len()];
    core.store_event(StoreEvent::Done { id: plan.id, pages }, 9);
    core.check().expect("everything adds up");
}

/// Computes a prompt, lets the copies of its pages be made and stored; their addresses.
fn compute_and_store(prompt: &[Token]) -> Vec<PageAddress> {
    let mut core = with_storage();
    let ns = core.namespace(&key("m", None, None)).expect("room");
    admit(&mut core, request(ns, prompt.to_vec(), 1), 1);
    run(&mut core, 1);
    // What the end of a request began comes out with the next plan.
    admit(&mut core, request(ns, vec![90; 6], 2), 2);
    let plan = core.schedule(ReplicaId(0), 3).expect("a request waits");
    for copy in &plan.copies {
        core.copy_done(
            CopyDone {
                id: copy.id,
                ok: true,
            },
            4,
        );
    }
    core.complete(ReplicaId(0), plan.id, &answer(&plan), 5);
    run(&mut core, 6);
    let plans = store_plans(&mut core);
    plans.iter().for_each(|plan| stored(&mut core, plan, true));
    assert!(plans.iter().all(|plan| plan.op == StoreOp::Write));
    let pages = plans.iter().flat_map(|plan| &plan.pages);
    pages.map(|page| page.address).collect()
}

#[test]
fn a_request_waits_for_what_storage_is_asked_for_and_runs_whatever_comes() {
    let prompt: Vec<Token> = (0..17).collect();
    let stored_pages = compute_and_store(&prompt);
    assert!(stored_pages.len() >= 4);
    for ok in [true, false] {
        let mut core = with_storage();
        core.store_event(StoreEvent::Learned(stored_pages.clone()), 1);
        let ns = core.namespace(&key("m", None, None)).expect("room");
        let id = admit(&mut core, request(ns, prompt.clone(), 1), 2);
        let plans = store_plans(&mut core);
        assert_eq!(
            (plans.len(), plans[0].op, plans[0].pages.len()),
            (1, StoreOp::Read, 4)
        );
        assert!(
            core.schedule(ReplicaId(0), 3).is_none(),
            "it waits for the read"
        );
        // Others do not wait.
        let other = admit(&mut core, request(ns, vec![90; 6], 2), 4);
        let plan = core.schedule(ReplicaId(0), 5).expect("another request");
        assert!(plan.rows.iter().all(|row| row.request == other));
        core.complete(ReplicaId(0), plan.id, &answer(&plan), 6);
        stored(&mut core, &plans[0], ok);
        let tokens = &prompt[..];
        let probe = core.probe(Key { ns, tokens }, ReplicaId(0));
        assert_eq!(probe.host_tokens, if ok { 16 } else { 0 });
        let plan = core
            .schedule(ReplicaId(0), 10)
            .expect("nothing waits any more");
        plan.copies
            .iter()
            .for_each(|copy| core.copy_done(CopyDone { id: copy.id, ok }, 11));
        core.complete(ReplicaId(0), plan.id, &answer(&plan), 12);
        let heard = run(&mut core, 13);
        assert_eq!(heard[&id].finals, [FinishReason::Length]);
    }
    // Nobody gives way to one that waits for it, however important.
    let mut core = with_storage_and_seats(1);
    core.store_event(StoreEvent::Learned(stored_pages.clone()), 1);
    let ns = core.namespace(&key("m", None, None)).expect("room");
    let low = admit(&mut core, request(ns, vec![90; 6], 3), 2);
    let plan = core.schedule(ReplicaId(0), 3).expect("the seat is free");
    core.complete(ReplicaId(0), plan.id, &answer(&plan), 4);
    let mut high = request(ns, prompt.clone(), 1);
    high.hints.priority = 10;
    let high = admit(&mut core, high, 5);
    let reads = store_plans(&mut core);
    let plan = core.schedule(ReplicaId(0), 6).expect("the other goes on");
    assert!(plan.rows.iter().all(|row| row.request == low));
    core.complete(ReplicaId(0), plan.id, &answer(&plan), 7);
    stored(&mut core, &reads[0], false);
    let plan = core.schedule(ReplicaId(0), 8).expect("a step");
    assert!(plan.rows.iter().all(|row| row.request == high));
    core.complete(ReplicaId(0), plan.id, &answer(&plan), 9);
    run(&mut core, 10);
    // A core that goes with reads under way gives everything back.
    let mut core = with_storage();
    core.store_event(StoreEvent::Learned(stored_pages), 1);
    let ns = core.namespace(&key("m", None, None)).expect("room");
    admit(&mut core, request(ns, prompt, 1), 2);
    assert_eq!(core.storage_under_way(), 4);
}
