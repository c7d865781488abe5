//! Policy `agent` and programs: what goes first when programs say what they do, what is kept when
//! not all of them fit, and that learning stays bounded and deterministic.
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use rootstock_memory::{CopyDone, Nanos, PageId, ReplicaId, TierId};
use rootstock_radix::{
    ActReason, Action, CacheConfig, Fate, Hints, Key, NamespaceId, NamespaceKey, Outcome,
    PolicyKind, PrefixCache, ProgramId, SpanMeta, Target, TenantId, Token, Ttl, WritePolicy,
};

const REPLICA: ReplicaId = ReplicaId(0);
const DEVICE: TierId = TierId::Device(REPLICA);
const SECOND: Nanos = 1_000_000_000;
const ME: TenantId = TenantId(1);

struct World {
    cache: PrefixCache,
    ns: NamespaceId,
    pages: Vec<PageId>,
}

impl World {
    fn new(policy: PolicyKind, pages: u32) -> Self {
        let config = CacheConfig {
            page_tokens: 1,
            device_pages: vec![pages],
            policy,
            ..CacheConfig::default()
        };
        let mut cache = PrefixCache::new(&config).unwrap();
        let ns = cache.namespace(&NamespaceKey::default()).unwrap();
        Self {
            cache,
            ns,
            pages: Vec::new(),
        }
    }

    /// One request from match to end; the pages found.
    fn ask(&mut self, tokens: &[Token], hints: &Hints, now: Nanos) -> u32 {
        let found = self.ask_unchecked(tokens, hints, now);
        self.cache.check().unwrap();
        found
    }

    fn ask_unchecked(&mut self, tokens: &[Token], hints: &Hints, now: Nanos) -> u32 {
        let key = Key {
            ns: self.ns,
            tokens,
        };
        let mut found = self.cache.match_lease(key, REPLICA, u32::MAX, now);
        self.cache.describe(ME, &mut found.lease, hints);
        let missing = &tokens[found.device_tokens as usize..];
        let count = u32::try_from(missing.len()).unwrap();
        if count > 0 {
            let (mut reservation, _) = self.cache.reserve(DEVICE, count, now).unwrap();
            let pages = self.cache.acquire(&mut reservation, count);
            let meta = SpanMeta::default();
            let _ = self
                .cache
                .extend(&mut found.lease, missing, pages, &meta, now);
        }
        self.cache.pages(&found.lease, &mut self.pages);
        self.cache.end(found.lease, Fate::Keep, now);
        found.device_tokens
    }

    fn cached(&self, tokens: &[Token]) -> u32 {
        let key = Key {
            ns: self.ns,
            tokens,
        };
        self.cache.probe(key, REPLICA).device_tokens
    }

    fn evict(&mut self, pages: u32, now: Nanos) {
        let free = self.cache.stats().tiers[0].free;
        self.cache.make_room(DEVICE, free + pages, now).unwrap();
        self.cache.check().unwrap();
    }
}

impl World {
    /// One turn from match to end: the answer follows the prompt.
    fn turn(&mut self, prompt: &[Token], answer: &[Token], now: Nanos) {
        self.turn_of(prompt, answer, &Hints::default(), now);
    }

    /// A turn with hints, whose priority its pages have.
    fn turn_of(&mut self, prompt: &[Token], answer: &[Token], hints: &Hints, now: Nanos) {
        let tokens = prompt;
        let key = Key {
            ns: self.ns,
            tokens,
        };
        let mut found = self.cache.match_lease(key, REPLICA, u32::MAX, now);
        self.cache.describe(ME, &mut found.lease, hints);
        let missing = &tokens[found.device_tokens as usize..];
        for part in [missing, answer] {
            let count = u32::try_from(part.len()).unwrap();
            let (mut reservation, _) = self.cache.reserve(DEVICE, count, now).unwrap();
            let pages = self.cache.acquire(&mut reservation, count);
            self.cache.cancel(reservation);
            let meta = SpanMeta {
                priority: hints.priority,
                ..SpanMeta::default()
            };
            let _ = self.cache.extend(&mut found.lease, part, pages, &meta, now);
        }
        self.cache.end(found.lease, Fate::Keep, now);
        self.cache.check().unwrap();
    }
}

fn of(program: &str) -> Hints {
    Hints {
        program: Some(program.to_owned()),
        ..Hints::default()
    }
}

fn last(program: &str) -> Hints {
    Hints {
        session_final: true,
        ..of(program)
    }
}

#[test]
fn what_a_finished_program_leaves_goes_first_and_what_others_share_stays() {
    let mut world = World::new(PolicyKind::Agent, 100);
    world.ask(&[1, 2, 10, 11], &of("a"), SECOND);
    world.ask(&[1, 2, 20, 21], &of("b"), 2 * SECOND);
    world.ask(&[1, 2, 20, 21, 22], &last("b"), 60 * SECOND);
    world.evict(3, 61 * SECOND);
    assert_eq!(world.cached(&[1, 2, 20, 21, 22]), 2, "b is done");
    assert_eq!(
        world.cached(&[1, 2, 10, 11]),
        4,
        "a goes on, though it is older"
    );
}

#[test]
fn a_prefix_that_its_program_has_left_goes_first() {
    let mut world = World::new(PolicyKind::Agent, 100);
    world.ask(&[1, 2, 3, 4, 5], &of("a"), SECOND);
    world.ask(&[7, 8, 9], &of("b"), SECOND);
    world.ask(&[1, 2, 30, 40], &of("a"), 90 * SECOND);
    world.evict(3, 91 * SECOND);
    assert_eq!(world.cached(&[1, 2, 3, 4, 5]), 2, "what a went back on");
    assert_eq!(world.cached(&[7, 8, 9]), 3);
    assert_eq!(world.cached(&[1, 2, 30, 40]), 4);
}

/// Kinds: what a template strips from the history goes before anything else, although nobody has
/// named a program and others are older.
#[test]
fn thinking_does_not_outlive_the_turn_that_strips_it() {
    let mut world = World::new(PolicyKind::Agent, 100);
    world.turn(&[90, 91, 92], &[93, 94], SECOND);
    world.turn(&[1, 2, 3], &[50, 51, 52, 60], 2 * SECOND);
    // A tool returns: the thinking is still in the prompt, then there is more of it.
    world.turn(&[1, 2, 3, 50, 51, 52, 60, 70], &[53, 54, 61], 30 * SECOND);
    // The user speaks, and the template strips it all.
    let next = [1, 2, 3, 60, 70, 61, 80];
    world.turn(&next, &[55, 56], 60 * SECOND);
    world.evict(8, 61 * SECOND);
    assert_eq!(world.cached(&[1, 2, 3, 50]), 3, "what was stripped is gone");
    assert_eq!(world.cached(&[90, 91, 92, 93, 94]), 5, "the oldest is not");
    assert_eq!(world.cached(&[1, 2, 3, 60, 70, 61, 80, 55, 56]), 9);
    // Another answer to the same prompt is no next turn, and neither is another prompt.
    world.turn(&[90, 91, 92, 93], &[94], 69 * SECOND);
    world.turn(&[90, 91, 92], &[95, 96], 70 * SECOND);
    world.turn(&[90, 91, 97, 98, 99], &[100], 71 * SECOND);
    world.evict(2, 72 * SECOND);
    assert_eq!(world.cached(&[90, 91, 92, 93, 94]), 5);
    assert_eq!(world.cached(&[90, 91, 92, 95, 96]), 5);
}

/// Importance orders what may be asked for again; what a template has stripped will not be.
#[test]
fn what_a_template_strips_goes_first_whatever_its_priority_and_only_a_pin_keeps_it() {
    for (program, pinned) in [(None, false), (Some("a"), false), (None, true)] {
        let mut world = World::new(PolicyKind::Agent, 100);
        let hints = Hints {
            program: program.map(str::to_owned),
            ..Hints::default()
        };
        world.turn(&[90, 91, 92], &[93, 94], SECOND);
        let important = Hints {
            priority: 9,
            ..hints.clone()
        };
        world.turn_of(&[1, 2, 3], &[50, 51, 52, 60], &important, 2 * SECOND);
        if pinned {
            let target = Target::Prefix {
                ns: world.ns,
                tokens: vec![1, 2, 3, 50, 51, 52, 60],
            };
            let ttl = Ttl {
                seconds: 600,
                clamped: false,
            };
            world
                .cache
                .act(ME, &Action::Pin { target, ttl }, 3 * SECOND);
        }
        let next = [1, 2, 3, 60, 80];
        world.turn_of(&next, &[55], &important, 60 * SECOND);
        world.evict(4, 61 * SECOND);
        let stripped = world.cached(&[1, 2, 3, 50, 51, 52, 60]);
        let old = world.cached(&[90, 91, 92, 93, 94]);
        let wanted = if pinned { (7, 1) } else { (3, 5) };
        assert_eq!((stripped, old), wanted, "{program:?}, pinned: {pinned}");
        assert_eq!(world.cached(&[1, 2, 3, 60, 80, 55]), 6);
    }
    // Who comes back to it takes that back.
    let mut world = World::new(PolicyKind::Agent, 100);
    world.turn(&[90, 91, 92], &[93, 94], SECOND);
    world.turn(&[1, 2, 3], &[50, 51], 2 * SECOND);
    world.turn(&[1, 2, 3, 60, 80], &[55], 30 * SECOND);
    world.turn(&[1, 2, 3, 50, 51, 70], &[71], 60 * SECOND);
    world.evict(5, 61 * SECOND);
    assert_eq!(world.cached(&[1, 2, 3, 50, 51, 70, 71]), 7);
}

#[test]
fn what_is_dropped_at_its_end_may_belong_to_a_program() {
    let mut world = World::new(PolicyKind::Agent, 100);
    world.ask(&[1, 2, 3], &of("a"), SECOND);
    let key = Key {
        ns: world.ns,
        tokens: &[1, 2, 3, 4],
    };
    let mut found = world.cache.match_lease(key, REPLICA, u32::MAX, 2 * SECOND);
    world.cache.describe(ME, &mut found.lease, &of("a"));
    let (mut reservation, _) = world.cache.reserve(DEVICE, 1, 2 * SECOND).unwrap();
    let pages = world.cache.acquire(&mut reservation, 1);
    let meta = SpanMeta::default();
    let _ = world
        .cache
        .extend(&mut found.lease, &[4], pages, &meta, 2 * SECOND);
    world.cache.end(found.lease, Fate::Ephemeral, 2 * SECOND);
    world.cache.check().unwrap();
    assert_eq!(world.cached(&[1, 2, 3, 4]), 3);
}

/// The host tier goes by the same order: what is worth nothing makes room there too, although it
/// came later.
#[test]
fn what_a_finished_program_leaves_goes_first_on_host() {
    let mut world = World::new(PolicyKind::Agent, 4);
    let config = CacheConfig {
        page_tokens: 1,
        device_pages: vec![4],
        host_pages: 8,
        write_policy: WritePolicy::Back,
        policy: PolicyKind::Agent,
        ..CacheConfig::default()
    };
    world.cache = PrefixCache::new(&config).unwrap();
    world.ns = world.cache.namespace(&NamespaceKey::default()).unwrap();
    let room = |world: &mut World, now| {
        let mut copies = match world.cache.make_room(DEVICE, 4, now) {
            Ok(room) => room.copies,
            Err(short) => {
                assert!(short.in_transit_pages > 0, "{short:?}");
                Vec::new()
            }
        };
        world.cache.drain_copies(&mut copies);
        for plan in copies {
            let done = CopyDone {
                id: plan.id,
                ok: true,
            };
            world.cache.copy_done(done, now);
        }
        world.cache.check().unwrap();
    };
    for (at, hints) in (1..).zip([of("a"), last("b"), of("c")]) {
        let first = Token::try_from(at).unwrap() * 10;
        world.ask(
            &[first, first + 1, first + 2, first + 3],
            &hints,
            at * SECOND,
        );
        room(&mut world, at * SECOND + SECOND / 2);
    }
    // What was copied down leaves the device when its room is needed.
    room(&mut world, 9 * SECOND);
    let on_host = |first: Token| {
        let tokens = [first, first + 1, first + 2, first + 3];
        let key = Key {
            ns: world.ns,
            tokens: &tokens,
        };
        world.cache.probe(key, REPLICA).host_tokens
    };
    assert_eq!([10, 20, 30].map(on_host), [4, 0, 4], "b is done");
}

#[test]
fn verbs_on_a_program_act_on_its_prefix_and_for_its_owner_alone() {
    let mut world = World::new(PolicyKind::Agent, 100);
    world.ask(&[1, 2, 3, 4], &of("a"), SECOND);
    world.ask(&[7, 8, 9], &of("b"), 2 * SECOND);
    let [a, b] = ["a", "b"].map(|name| world.cache.program(ME, world.ns, name));
    let target = Target::Program(a);
    let release = Action::Release {
        target: target.clone(),
    };
    let stranger = world.cache.act(TenantId(2), &release, 3 * SECOND);
    assert_eq!(stranger, Outcome::Missing, "not the owner");
    let pin = Action::Pin {
        target: Target::Program(b),
        ttl: Ttl {
            seconds: 9,
            clamped: false,
        },
    };
    let pinned = world.cache.act(ME, &pin, 3 * SECOND);
    assert_eq!(pinned, Outcome::Accepted { pages: 3 });
    let released = world.cache.act(ME, &release, 3 * SECOND);
    assert_eq!(released, Outcome::Accepted { pages: 4 });
    world.evict(4, 4 * SECOND);
    assert_eq!(
        (world.cached(&[1, 2, 3, 4]), world.cached(&[7, 8, 9])),
        (0, 3)
    );
    assert_eq!(world.cache.act(ME, &release, 5 * SECOND), Outcome::Missing);
    let nobody = Action::Demote {
        target: Target::Program(ProgramId(99)),
    };
    assert_eq!(world.cache.act(ME, &nobody, SECOND), Outcome::Missing);
    let zero = Action::Pin {
        target: Target::Program(b),
        ttl: Ttl {
            seconds: 0,
            clamped: false,
        },
    };
    let refused = world.cache.act(ME, &zero, 5 * SECOND);
    assert_eq!(refused, Outcome::Rejected(ActReason::ZeroTtl));
}

#[test]
fn verbs_on_a_program_act_on_all_its_branches_and_count_each_page_once() {
    let mut world = World::new(PolicyKind::Agent, 100);
    // Two branches after two shared pages, the second one in two turns.
    world.ask(&[1, 2, 3, 4], &of("a"), SECOND);
    world.ask(&[1, 2, 30], &of("a"), 2 * SECOND);
    world.ask(&[1, 2, 30, 40, 50], &of("a"), 3 * SECOND);
    let other = NamespaceKey {
        salt: Some("other".to_owned()),
        ..NamespaceKey::default()
    };
    let other = world.cache.namespace(&other).unwrap();
    let a = world.cache.find_program(ME, world.ns, "a").unwrap();
    assert_eq!(
        world.cache.find_program(ME, other, "a"),
        None,
        "another salt"
    );
    assert_ne!(world.cache.program(ME, other, "a"), a);
    let target = Target::Program(a);
    let retain = Action::Retain {
        target: target.clone(),
        priority: 7,
        seconds: None,
    };
    let all = Outcome::Accepted { pages: 7 };
    assert_eq!(world.cache.act(ME, &retain, 4 * SECOND), all);
    let pin = Action::Pin {
        target: target.clone(),
        ttl: Ttl {
            seconds: 60,
            clamped: false,
        },
    };
    assert_eq!(world.cache.act(ME, &pin, 4 * SECOND), all);
    assert_eq!(world.cache.stats().pinned_pages, 7);
    let release = Action::Release { target };
    assert_eq!(world.cache.act(ME, &release, 5 * SECOND), all);
    assert_eq!(world.cache.stats().pinned_pages, 0);
    world.cache.check().unwrap();
}

#[test]
fn a_pin_on_a_program_begins_with_its_newest_branch_and_ends_with_the_budget() {
    let mut world = World::new(PolicyKind::Agent, 12);
    world.ask(&[1, 2, 3, 4], &of("a"), SECOND);
    world.ask(&[1, 2, 30, 40, 50], &of("a"), 2 * SECOND);
    let a = world.cache.find_program(ME, world.ns, "a").unwrap();
    let pin = Action::Pin {
        target: Target::Program(a),
        ttl: Ttl {
            seconds: 60,
            clamped: false,
        },
    };
    let pinned = world.cache.act(ME, &pin, 3 * SECOND);
    let budget = world.cache.stats().pin_budget_pages;
    assert_eq!(budget, 6);
    let asked_pages = 7;
    assert_eq!(
        pinned,
        Outcome::Clipped {
            pages: 6,
            asked_pages
        }
    );
}

#[test]
fn a_program_is_counted_and_its_lifetime_derived_from_its_gaps() {
    let mut world = World::new(PolicyKind::Agent, 100);
    for turn in 0..4 {
        world.ask(&[1, 2, 3], &of("a"), (10 + 30 * turn) * SECOND);
    }
    let a = world.cache.program(ME, world.ns, "a");
    let known = world.cache.program_stats(a).unwrap();
    assert_eq!((known.turns, known.gap_ns), (4, Some(30 * SECOND)));
    assert_eq!((known.derived_ttl_s, known.done), (Some(120), false));
    assert_eq!(world.cache.stats().programs, 1);
    assert!(world.cache.program_stats(ProgramId(99)).is_none());
}

/// Twenty programs of ten pages take turns, and half of them fit.
fn carousel(policy: PolicyKind, rounds: u64) -> (u32, World) {
    let mut world = World::new(policy, 100);
    let mut hits = 0;
    for turn in 0..rounds * 20 {
        let program = u32::try_from(turn % 20).unwrap() * 100;
        let tokens: Vec<Token> = (program..program + 10).collect();
        hits += world.ask(&tokens, &Hints::default(), turn * SECOND);
    }
    (hits, world)
}

#[test]
fn where_the_working_set_does_not_fit_some_programs_stay_whole() {
    let (lru, _) = carousel(PolicyKind::Lru, 60);
    assert_eq!(lru, 0, "each is gone before it comes back");
    let (agent, _) = carousel(PolicyKind::Agent, 60);
    assert!(agent > 60 * 200 / 6, "{agent} of {} pages found", 60 * 200);
}

#[test]
fn the_same_requests_get_the_same_pages() {
    let [one, other] = [(), ()].map(|()| carousel(PolicyKind::Agent, 30).1);
    assert_eq!(one.pages, other.pages);
    assert_eq!(one.cache.stats(), other.cache.stats());
}

#[test]
fn the_curve_of_least_recently_used_is_known_while_another_policy_rules() {
    let (_, world) = carousel(PolicyKind::Agent, 60);
    let duel = world.cache.stats().duel.unwrap();
    assert!(!duel.lru_rules && duel.watched_uses > 0, "{duel:?}");
    let hits_at = |pages: u64| duel.lru_curve.iter().find(|one| one.0 == pages).unwrap().1;
    assert_eq!(hits_at(100), 0, "{duel:?}");
    assert_eq!(hits_at(200), duel.watched_uses, "all would fit: {duel:?}");
    assert!(World::new(PolicyKind::Lru, 9).cache.stats().duel.is_none());
}

/// Forty programs of nine pages and a tool list of three, which come back after pauses that differ
/// widely; each turn adds a page. The share of pages found, and the world.
fn crowd(policy: PolicyKind, pages: u32) -> (f64, World) {
    let mut world = World::new(policy, pages);
    let mut due: Vec<(Nanos, u32, u32)> =
        (0..40).map(|one| (u64::from(one) << 28, one, 0)).collect();
    let (mut seed, mut hits, mut asked) = (7_u32, 0, 0);
    for _ in 0..4000 {
        due.sort_unstable();
        let (now, program, turn) = due.remove(0);
        let tokens = (0..3).chain(program * 1000 + 100..program * 1000 + 109 + turn % 16);
        let tokens: Vec<Token> = tokens.collect();
        hits += world.ask_unchecked(&tokens, &Hints::default(), now);
        asked += tokens.len();
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let pause = 1 << (28 + (seed >> 16) % 8);
        due.push((now + pause + u64::from(seed >> 8), program, turn + 1));
    }
    world.cache.check().unwrap();
    (f64::from(hits) / asked as f64, world)
}

#[test]
fn the_expected_curve_is_within_two_points_of_caches_of_those_sizes() {
    let (own, world) = crowd(PolicyKind::Agent, 240);
    let curve = world.cache.stats().curve.unwrap();
    assert_eq!(curve.points.len(), 7);
    let of_all = |tokens: u64| tokens as f64 / curve.lookup_tokens as f64;
    assert!((of_all(curve.hit_tokens) - own).abs() < 1e-9);
    let mut spread = 0.0;
    for point in &curve.points {
        let pages = u32::try_from(point.pages).unwrap();
        for (policy, expected) in [
            (PolicyKind::Agent, point.hit_tokens),
            (PolicyKind::Lru, point.lru_hit_tokens),
        ] {
            let (real, _) = crowd(policy, pages);
            let expected = of_all(expected);
            let off = (expected - real).abs();
            assert!(
                off < 0.02,
                "{policy:?} at {pages}: {expected:.3}, really {real:.3}"
            );
            spread = f64::max(spread, (real - own).abs());
        }
    }
    assert!(spread > 0.2, "the sizes differ in what they find: {spread}");
    assert!(crowd(PolicyKind::Lru, 240).1.cache.stats().curve.is_none());
}
