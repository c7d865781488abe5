//! Programs and who started them: what is known of each, and what is brought up for those that are
//! expected.
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use rootstock_memory::{CopyDone, Nanos, ReplicaId, TierId};
use rootstock_radix::{
    Action, CacheConfig, Fate, Hints, Key, NamespaceId, NamespaceKey, Outcome, PolicyKind,
    PrefixCache, ProgramId, ProgramPages, Served, SpanMeta, Target, TenantId, Token, WritePolicy,
};

const REPLICA: ReplicaId = ReplicaId(0);
const DEVICE: TierId = TierId::Device(REPLICA);
const SECOND: Nanos = 1_000_000_000;
const ME: TenantId = TenantId(1);

struct World {
    cache: PrefixCache,
    ns: NamespaceId,
}

impl World {
    /// Pages of one token; all that is computed is written to host at once.
    fn new(device: u32, host: u32) -> Self {
        let config = CacheConfig {
            page_tokens: 1,
            device_pages: vec![device],
            host_pages: host,
            write_policy: WritePolicy::Through,
            policy: PolicyKind::Agent,
            ..CacheConfig::default()
        };
        let mut cache = PrefixCache::new(&config).unwrap();
        let ns = cache.namespace(&NamespaceKey::default()).unwrap();
        Self { cache, ns }
    }

    /// One request from match to end; the pages found on the device.
    fn ask(&mut self, tokens: &[Token], hints: &Hints, now: Nanos) -> u32 {
        let ns = self.ns;
        let key = Key { ns, tokens };
        let mut found = self.cache.match_lease(key, REPLICA, u32::MAX, now);
        self.cache.describe(ME, &mut found.lease, hints);
        let missing = &tokens[found.device_tokens as usize..];
        let count = u32::try_from(missing.len()).unwrap();
        let (mut reservation, _) = self.cache.reserve(DEVICE, count, now).unwrap();
        let pages = self.cache.acquire(&mut reservation, count);
        let meta = SpanMeta::default();
        let _ = self
            .cache
            .extend(&mut found.lease, missing, pages, &meta, now);
        self.cache.end(found.lease, Fate::Keep, now);
        self.copy(now);
        found.device_tokens
    }

    /// Carries out all copies; how many there were.
    fn copy(&mut self, now: Nanos) -> usize {
        let mut copies = Vec::new();
        self.cache.drain_copies(&mut copies);
        for plan in &copies {
            let done = CopyDone {
                id: plan.id,
                ok: true,
            };
            self.cache.copy_done(done, now);
        }
        self.cache.check().unwrap();
        copies.len()
    }

    /// Pages of a prefix on the device.
    fn there(&self, tokens: &[Token]) -> u32 {
        let ns = self.ns;
        self.cache.probe(Key { ns, tokens }, REPLICA).device_tokens
    }

    /// All that nobody uses leaves the device.
    fn empty_device(&mut self, now: Nanos) {
        let total = self.cache.total(DEVICE);
        self.cache.make_room(DEVICE, total, now).unwrap();
        self.cache.check().unwrap();
    }

    fn id(&self, name: &str) -> ProgramId {
        self.cache.find_program(ME, self.ns, name).unwrap()
    }

    fn bring_back(&mut self, now: Nanos) -> usize {
        self.cache.bring_back(now, |_| true);
        self.copy(now)
    }
}

fn of(program: &str) -> Hints {
    Hints {
        program: Some(program.to_owned()),
        ..Hints::default()
    }
}

fn child(program: &str, parent: &str) -> Hints {
    Hints {
        parent: Some(parent.to_owned()),
        ..of(program)
    }
}

#[test]
fn a_program_has_one_parent_and_each_parent_knows_its_children() {
    let mut world = World::new(100, 100);
    let children = |world: &World, name: &str| -> Vec<String> {
        let children = world.cache.program_children(world.id(name));
        let names = children.map(|id| world.cache.program_name(id).unwrap().to_owned());
        names.collect()
    };
    world.ask(&[1, 2], &child("a", "root"), SECOND);
    world.ask(&[1, 3], &child("b", "root"), SECOND);
    world.ask(&[1, 2, 4], &child("a", "root"), SECOND);
    assert_eq!(children(&world, "root"), ["a", "b"]);
    let root = world.id("root");
    assert_eq!(world.cache.program_parent(world.id("b")), Some(root));
    assert_eq!(world.cache.program_parent(root), None);
    assert_eq!(world.cache.program_stats(root).unwrap().turns, 0);
    // It names another one now; nobody is the parent of itself, and a circle does no harm.
    world.ask(&[1, 3, 5], &child("b", "a"), SECOND);
    world.ask(&[9], &child("root", "b"), SECOND);
    world.ask(&[9], &child("root", "root"), SECOND);
    assert_eq!(children(&world, "root"), ["a"]);
    assert_eq!(children(&world, "a"), ["b"]);
    assert_eq!(children(&world, "b"), ["root"]);
    let newest: Vec<_> = world.cache.programs_of(ME, world.ns).collect();
    assert_eq!(
        newest[..2],
        [world.id("root"), world.id("b")],
        "in the order of use"
    );
    assert_eq!(newest.len(), 3);
}

#[test]
fn programs_and_their_links_are_bounded_and_those_in_use_stay() {
    const MOST: u32 = 1 << 16;
    let mut world = World::new(100, 100);
    world.ask(&[1], &child("early", "root"), SECOND);
    for number in 0..MOST - 2 {
        world.cache.program(ME, world.ns, &number.to_string());
    }
    assert_eq!(world.cache.stats().programs, MOST);
    world.ask(&[2], &child("late", "root"), SECOND);
    let known = |name: &str| world.cache.find_program(ME, world.ns, name).is_some();
    assert!(known("late") && known("0"), "one was forgotten");
    assert!(known("root"), "its child has just asked");
    assert!(!known("early"), "it asked longest ago");
    let children: Vec<_> = world.cache.program_children(world.id("root")).collect();
    assert_eq!(children, [world.id("late")]);
    assert_eq!(world.cache.stats().programs, MOST);
    world.cache.check().unwrap();
}

#[test]
fn a_prompt_found_on_any_tier_is_a_hit_and_one_found_on_none_is_not() {
    for (device_tokens, host_tokens, storage_tokens, hits) in [
        (0, 0, 0, 0),
        (3, 0, 0, 1),
        (0, 2, 0, 1),
        (0, 0, 1, 1),
        (3, 2, 1, 1),
    ] {
        let mut world = World::new(100, 100);
        let prompt = [1, 2, 3, 4];
        let key = Key {
            ns: world.ns,
            tokens: &prompt,
        };
        let mut found = world.cache.match_lease(key, REPLICA, u32::MAX, SECOND);
        world.cache.describe(ME, &mut found.lease, &of("a"));
        let served = Served {
            prompt_tokens: 9,
            device_tokens,
            host_tokens,
            storage_tokens,
        };
        world.cache.served(&found.lease, served);
        let stats = world.cache.program_stats(world.id("a")).unwrap();
        assert_eq!((stats.hits, stats.served), (hits, served));
        world.cache.end(found.lease, Fate::Keep, SECOND);
    }
}

#[test]
fn where_prompts_came_from_and_where_pages_are_is_counted_by_program() {
    let mut world = World::new(100, 100);
    let prompt = [1, 2, 3, 4];
    world.ask(&prompt, &of("a"), SECOND);
    let key = Key {
        ns: world.ns,
        tokens: &prompt,
    };
    let mut found = world.cache.match_lease(key, REPLICA, u32::MAX, 2 * SECOND);
    world.cache.describe(ME, &mut found.lease, &of("a"));
    let served = Served {
        prompt_tokens: 5,
        device_tokens: 3,
        host_tokens: 1,
        storage_tokens: 0,
    };
    world.cache.served(&found.lease, served);
    let a = world.id("a");
    let stats = world.cache.program_stats(a).unwrap();
    assert_eq!((stats.turns, stats.running, stats.hits), (1, 1, 1));
    assert_eq!((stats.served, stats.seen_ns), (served, 2 * SECOND));
    world.cache.end(found.lease, Fate::Keep, 3 * SECOND);
    assert_eq!(world.cache.program_stats(a).unwrap().running, 0);
    let pages = |distinct, device, host| ProgramPages {
        distinct,
        device,
        host,
        ..ProgramPages::default()
    };
    assert_eq!(world.cache.program_holds(a), pages(4, 4, 4));
    world.empty_device(4 * SECOND);
    // Another branch after one shared page.
    world.ask(&[1, 9], &of("a"), 5 * SECOND);
    assert_eq!(world.cache.program_holds(a), pages(5, 2, 5));
}

#[test]
fn what_a_program_needs_goes_up_shortly_before_its_usual_time() {
    let mut world = World::new(16, 100);
    let prompt = [1, 2, 3, 4];
    world.ask(&prompt, &of("a"), 0);
    assert_eq!(world.cache.returns_at(), None, "no gap is known");
    world.ask(&prompt, &of("a"), 80 * SECOND);
    let stats = world.cache.program_stats(world.id("a")).unwrap();
    assert_eq!(stats.due_ns, Some(160 * SECOND));
    assert_eq!(world.cache.returns_at(), Some(150 * SECOND));
    world.empty_device(100 * SECOND);
    assert_eq!(world.bring_back(149 * SECOND), 0, "not yet");
    assert_eq!(world.there(&prompt), 0);
    assert_eq!(world.bring_back(150 * SECOND), 1);
    assert_eq!(world.there(&prompt), 4);
    let returns = world.cache.stats().returns;
    assert_eq!((returns.programs, returns.pages), (1, 4));
    assert_eq!(world.cache.returns_at(), None, "once a return");
    assert_eq!(world.ask(&prompt, &of("a"), 160 * SECOND), 4);
    // Who asks is not expected, and who is done neither.
    let done = Hints {
        session_final: true,
        ..of("a")
    };
    world.ask(&prompt, &done, 240 * SECOND);
    assert_eq!(world.cache.returns_at(), None);
}

#[test]
fn nothing_goes_up_under_pressure_nor_at_the_cost_of_what_is_worth_more() {
    let mut world = World::new(16, 100);
    let prompt = [1, 2, 3, 4];
    for turn in 0..2 {
        world.ask(&prompt, &of("a"), turn * 80 * SECOND);
    }
    world.empty_device(100 * SECOND);
    world.cache.bring_back(150 * SECOND, |_| false);
    assert_eq!(world.copy(150 * SECOND), 0, "requests wait for memory");
    assert_eq!(world.cache.stats().returns.pressed, 1);
    world.ask(&prompt, &of("a"), 160 * SECOND);
    world.empty_device(170 * SECOND);
    // Half of the device is important, the other half just used.
    let important: Vec<Token> = (100..108).collect();
    world.ask(&important, &of("b"), 171 * SECOND);
    let retain = Action::Retain {
        target: Target::Program(world.id("b")),
        priority: 5,
        seconds: None,
    };
    world.cache.act(ME, &retain, 171 * SECOND);
    let fresh: Vec<Token> = (200..208).collect();
    world.ask(&fresh, &of("c"), 229 * SECOND);
    world.bring_back(231 * SECOND);
    assert_eq!(world.there(&important), 8);
    let stats = world.cache.stats();
    assert_eq!(stats.tiers[0].free, 0, "nothing went for it");
    assert_eq!(world.there(&prompt), 0);
}

#[test]
fn when_a_child_closes_its_parent_is_expected_and_finds_its_prefix() {
    for by_release in [false, true] {
        let mut world = World::new(16, 100);
        let prompt = [1, 2, 3, 4];
        world.ask(&prompt, &of("parent"), SECOND);
        world.ask(&[7, 8], &child("child", "parent"), 2 * SECOND);
        world.empty_device(3 * SECOND);
        assert_eq!(world.cache.returns_at(), None);
        let other = [40, 41, 42, 43];
        world.ask(&other, &of("other"), 3 * SECOND + SECOND / 2);
        if by_release {
            let target = Target::Program(world.id("child"));
            let released = world.cache.act(ME, &Action::Release { target }, 4 * SECOND);
            assert_eq!(released, Outcome::Accepted { pages: 2 });
        } else {
            let done = Hints {
                session_final: true,
                ..child("child", "parent")
            };
            world.ask(&[7, 8], &done, 4 * SECOND);
        }
        let parent = world.id("parent");
        let stats = world.cache.program_stats(parent).unwrap();
        assert_eq!(stats.due_ns, Some(4 * SECOND));
        assert_eq!(world.cache.returns_at(), Some(4 * SECOND));
        assert_eq!(world.bring_back(4 * SECOND), 1);
        assert_eq!(world.there(&prompt), 4);
        // It is worth more now than what was used later and is not expected.
        let now = 4 * SECOND + SECOND / 4;
        let (tiers, gone) = (world.cache.stats().tiers, 4 + u32::from(!by_release) * 2);
        let room = tiers[0].free + gone;
        world.cache.make_room(DEVICE, room, now).unwrap();
        assert_eq!((world.there(&prompt), world.there(&other)), (4, 0));
    }
}

#[test]
fn a_parent_that_runs_or_is_done_is_not_expected() {
    let mut world = World::new(16, 100);
    let done = |name: &str| Hints {
        session_final: true,
        ..child(name, "parent")
    };
    let key = Key {
        ns: world.ns,
        tokens: &[1],
    };
    let mut found = world.cache.match_lease(key, REPLICA, 1, SECOND);
    world.cache.describe(ME, &mut found.lease, &of("parent"));
    world.ask(&[7, 8], &done("a"), 2 * SECOND);
    assert_eq!(world.cache.returns_at(), None, "it runs");
    world.cache.end(found.lease, Fate::Keep, 3 * SECOND);
    let last = Hints {
        session_final: true,
        ..of("parent")
    };
    world.ask(&[1, 2], &last, 4 * SECOND);
    world.ask(&[7, 8], &done("b"), 5 * SECOND);
    assert_eq!(world.cache.returns_at(), None, "it is done");
}

/// A program remembers eight prefixes, and the same one again is none more.
#[test]
fn a_prefix_that_a_program_asks_for_again_and_again_pushes_no_other_out() {
    let mut world = World::new(16, 16);
    world.ask(&[1, 2, 3], &of("a"), SECOND);
    for turn in 2..12 {
        world.ask(&[1, 9], &of("a"), turn * SECOND);
    }
    let a = world.id("a");
    assert_eq!(world.cache.program_holds(a).distinct, 4);
}
