//! Retention: importance with an end, on shared prefixes, by spans, on both tiers.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "shared/host.rs"]
mod host;

use host::{DEVICE, Host};
use rootstock_memory::CopyDone;
use rootstock_radix::{
    Action, CacheConfig, Hints, Outcome, PolicyKind, Retention, SpanMeta, Target, TenantId, Token,
    WritePolicy,
};

const SECOND: u64 = 1_000_000_000;

fn by_priority(device: u32, host_pages: u32) -> Host {
    Host::new(&CacheConfig {
        page_tokens: 1,
        device_pages: vec![device],
        host_pages,
        policy: PolicyKind::Priority,
        write_policy: WritePolicy::Back,
        ..CacheConfig::default()
    })
}

fn insert(host: &mut Host, tokens: &[Token], priority: i32, seconds: impl Into<Option<u32>>) {
    let mut lease = host.find(tokens).lease;
    let covered = lease.len_tokens() as usize;
    let n = u32::try_from(tokens.len() - covered).unwrap();
    let (mut reservation, _) = host.cache.reserve(DEVICE, n, host.now).unwrap();
    let pages = host.cache.acquire(&mut reservation, n);
    let meta = SpanMeta {
        priority,
        retention_s: seconds.into(),
        ..SpanMeta::default()
    };
    let rest = &tokens[covered..];
    let _ = host.cache.extend(&mut lease, rest, pages, &meta, host.now);
    host.end(lease);
}

/// The order in which single tokens go.
fn order(host: &mut Host, all: &[Token]) -> Vec<Token> {
    let mut left = all.to_vec();
    let mut gone = Vec::new();
    while !left.is_empty() {
        assert!(host.evict(1));
        let (now_gone, still) = left.iter().partition(|&&token| host.peek(&[token]) == 0);
        left = still;
        let now_gone: Vec<Token> = now_gone;
        gone.extend(now_gone);
    }
    gone
}

fn target(host: &Host, tokens: &[Token]) -> Target {
    Target::Prefix {
        ns: host.ns,
        tokens: tokens.to_vec(),
    }
}

#[test]
fn importance_ends_after_its_seconds_of_idleness_and_not_before() {
    for (late_s, expected) in [(60, [2, 3, 1]), (61, [1, 2, 3])] {
        let mut host = by_priority(10, 0);
        insert(&mut host, &[1], 10, 60);
        insert(&mut host, &[2], 0, None);
        insert(&mut host, &[3], 1, None);
        host.now = late_s * SECOND + 1;
        host.cache.tick(host.now);
        host.cache.check().unwrap();
        assert_eq!(order(&mut host, &[1, 2, 3]), expected, "after {late_s} s");
        assert_eq!(host.cache.stats().retained_nodes, 0);
    }
}

#[test]
fn use_starts_the_idle_time_again_and_what_is_in_use_does_not_idle() {
    let mut host = by_priority(10, 0);
    insert(&mut host, &[1], 10, 60);
    insert(&mut host, &[2], 5, None);
    host.now = 50 * SECOND;
    let _ = host.hit(&[1]);
    host.now = 100 * SECOND;
    let lease = host.find(&[1]).lease;
    // In use all the time, with a tick in between and with none.
    for now_s in [170, 400] {
        host.now = now_s * SECOND;
        host.cache.tick(host.now);
        host.cache.check().unwrap();
    }
    host.end(lease);
    host.now = 459 * SECOND;
    host.cache.tick(host.now);
    assert!(host.evict(1));
    assert_eq!((host.peek(&[1]), host.peek(&[2])), (1, 0));
}

#[test]
fn importance_that_has_ended_is_not_brought_back_by_a_match() {
    let mut host = by_priority(10, 0);
    insert(&mut host, &[1], 10, 60);
    insert(&mut host, &[2], 5, None);
    host.now = 61 * SECOND + 2;
    let _ = host.hit(&[1]);
    assert!(host.evict(1));
    assert_eq!((host.peek(&[1]), host.peek(&[2])), (0, 1));
}

#[test]
fn a_shared_prefix_takes_the_higher_then_the_longer_and_what_lasts_stays() {
    let mut host = by_priority(20, 0);
    insert(&mut host, &[1, 2], 3, None);
    insert(&mut host, &[1, 3], 10, 30);
    insert(&mut host, &[1, 4], 10, 60);
    insert(&mut host, &[1, 5], 0, None);
    for (token, priority) in [(7, 4), (8, 11), (9, 2)] {
        insert(&mut host, &[token], priority, None);
    }
    // The leaves go by their own statements; the shared part is worth 10 while they hold.
    host.now = 45 * SECOND;
    host.cache.tick(host.now);
    let mut left = vec![[1, 3], [1, 5], [9, 9], [1, 2], [7, 7], [1, 4]];
    while left.len() > 1 {
        let gone = left.remove(0);
        assert!(host.evict(1));
        let cached = |one: &[Token; 2]| host.peek(if one[0] == 1 { one } else { &one[..1] });
        assert_eq!(cached(&gone), u32::from(gone[0] == 1), "{gone:?} goes");
        assert!(left.iter().all(|one| cached(one) > u32::from(one[0] == 1)));
    }
    // At 61 s nothing but the lasting 3 is left of the shared part.
    host.now = 61 * SECOND;
    host.cache.tick(host.now);
    assert!(host.evict(2));
    assert_eq!((host.peek(&[1]), host.peek(&[8])), (0, 1));
}

#[test]
fn a_split_divides_importance_and_renews_nothing() {
    let mut host = by_priority(20, 0);
    insert(&mut host, &[1, 2, 3, 4], 10, 60);
    insert(&mut host, &[9], 1, None);
    host.now = 40 * SECOND;
    insert(&mut host, &[1, 2, 8], 0, None);
    assert_eq!(host.cache.stats().retained_nodes, 2);
    host.now = 70 * SECOND;
    host.cache.tick(host.now);
    host.cache.check().unwrap();
    // The part that was used at 40 s holds, the cut-off tail does not.
    assert_eq!(host.cache.stats().retained_nodes, 1);
    assert!(host.evict(3));
    assert_eq!((host.peek(&[1, 2]), host.peek(&[9])), (2, 1));
    assert!(host.evict(1));
    assert_eq!((host.peek(&[1, 2]), host.peek(&[9])), (2, 0));
}

#[test]
fn below_zero_for_a_while_means_first_to_go_for_a_while() {
    for (late_s, first) in [(1, 1), (31, 2)] {
        let mut host = by_priority(10, 0);
        insert(&mut host, &[1], -5, 30);
        insert(&mut host, &[2], -1, None);
        host.now = late_s * SECOND + 1;
        host.cache.tick(host.now);
        assert_eq!(order(&mut host, &[1, 2])[0], first);
    }
}

#[test]
fn retain_raises_what_is_cached_and_says_how_far() {
    let mut host = by_priority(10, 0);
    host.insert(&[1, 2, 3, 4], 0);
    host.insert(&[7], 1);
    let act = |host: &mut Host, tokens: &[Token], priority, seconds| {
        let target = target(host, tokens);
        let action = Action::Retain {
            target,
            priority,
            seconds,
        };
        let outcome = host.cache.act(TenantId(1), &action, host.now);
        host.cache.check().unwrap();
        outcome
    };
    let clipped = Outcome::Clipped {
        pages: 2,
        asked_pages: 3,
    };
    assert_eq!(act(&mut host, &[1, 2, 9], 5, Some(u64::MAX)), clipped);
    assert_eq!(act(&mut host, &[8], 5, Some(10)), Outcome::Missing);
    let accepted = Outcome::Accepted { pages: 1 };
    assert_eq!(act(&mut host, &[7], 9, Some(10)), accepted);
    host.now += 11 * SECOND;
    assert!(host.evict(3));
    // 3 and 4 were worth 0, then 7 fell back to its lasting 1; 1 and 2 are worth 5.
    assert_eq!((host.peek(&[1, 2, 3]), host.peek(&[7])), (2, 0));
}

#[test]
fn with_a_host_tier_importance_decides_there_too_until_it_ends() {
    for (late_s, kept, gone) in [(1, 1, 2), (70, 2, 1)] {
        // Two prefixes of four pages, room for one of them on host.
        let mut host = by_priority(8, 4);
        let prefix = |first: Token| (first * 10..first * 10 + 4).collect::<Vec<_>>();
        insert(&mut host, &prefix(1), 10, 60);
        host.now = SECOND / 2;
        insert(&mut host, &prefix(2), 0, None);
        host.now = late_s * SECOND;
        for _ in 0..4 {
            if host.cache.make_room(DEVICE, 8, host.now).is_ok() {
                break;
            }
            let mut plans = Vec::new();
            host.cache.drain_copies(&mut plans);
            for plan in plans {
                let done = CopyDone {
                    id: plan.id,
                    ok: true,
                };
                host.cache.copy_done(done, host.now);
            }
            host.cache.check().unwrap();
        }
        assert_eq!(host.tier().free, 8);
        let on_host = |host: &mut Host, first| {
            let found = host.find(&prefix(first));
            host.end(found.lease);
            found.host_tokens
        };
        assert_eq!(on_host(&mut host, kept), 4, "{late_s} s");
        assert_eq!(on_host(&mut host, gone), 0, "{late_s} s");
    }
}

#[test]
fn spans_say_how_important_each_page_is() {
    let said = |priority, seconds| Retention { priority, seconds };
    let hints = Hints {
        priority: 1,
        retain: vec![(0..20, said(65, Some(30))), (64..u32::MAX, said(-35, None))],
        retain_output: Some(said(15, Some(5))),
        ..Hints::default()
    };
    let mut at = 0;
    let mut runs = Vec::new();
    while at < 8 {
        let (end, meta) = hints.span(at..8, 16, 100);
        runs.push((at..end, meta.priority, meta.retention_s));
        at = end;
    }
    // A page of two spans takes the stronger; page 6 ends the prompt and begins the output.
    let expected = [
        (0..2, 65, Some(30)),
        (2..4, 1, None),
        (4..6, -35, None),
        (6..8, 15, Some(5)),
    ];
    assert_eq!(runs, expected);
    assert_eq!(said(3, Some(9)).max(said(3, None)), said(3, None));
    assert_eq!(Retention::of_tensorrt_priority(0, None).priority, -35);
    assert_eq!(Retention::of_tensorrt_priority(900, None).priority, 65);
}
