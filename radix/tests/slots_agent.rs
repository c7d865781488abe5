//! Policy `agent`, retention and pins over slots that a host owns, driven as SGLang's controller
//! does: look up, hold, insert, let go; evict node by node, with copies in between.
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

#[path = "shared/random.rs"]
mod random;

use random::Random;
use rootstock_radix::slots::{
    Asker, Digest, Freed, Handle, HostTier, Insertion, LeafEnd, SlotAction, SlotConfig, SlotPolicy,
    SlotTree, SpaceName,
};
use rootstock_radix::{ContextKind, Hints, ProgramId, Retention};
use std::collections::BTreeSet;
use std::sync::Arc;

const SECOND: u64 = 1_000_000_000;

fn name(before: Option<&Digest>, tokens: &[u32]) -> Digest {
    let mut digest = before.copied().unwrap_or_default();
    digest[0] = digest[0].wrapping_add(u8::try_from(tokens[0] % 251).unwrap());
    digest
}

/// A tree, and the controller that owns its slots.
struct World {
    tree: SlotTree,
    device: BTreeSet<i64>,
    host: BTreeSet<i64>,
    now: u64,
    found: usize,
    copied: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Host {
    None,
    Through,
    Back,
}

impl World {
    fn new(policy: SlotPolicy, device: u32, host: u32, kind: Host) -> Self {
        let mut tree = SlotTree::new(SlotConfig {
            page_tokens: 1,
            policy,
            events: false,
            hasher: name,
            pin_budget: 0.5,
            device_tokens: device.into(),
        });
        tree.host = HostTier {
            enabled: kind != Host::None,
            write_back: kind == Host::Back,
            write_through_hits: 1000,
            storage: false,
            tokens: 0,
        };
        tree.set_host_tokens(host.into());
        Self {
            tree,
            device: (0..i64::from(device)).collect(),
            host: (0..i64::from(host)).collect(),
            now: 0,
            found: 0,
            copied: 0,
        }
    }

    fn at(&mut self, now_s: u64) {
        self.now = now_s * SECOND;
        self.tree.set_now(self.now);
        self.tree.expire_pins(self.now);
    }

    fn free(&mut self, freed: Freed) -> usize {
        for slot in freed.device.into_iter().flatten() {
            assert!(self.device.insert(slot), "a slot is freed twice");
        }
        for slot in freed.host.into_iter().flatten() {
            assert!(self.host.insert(slot), "a host slot is freed twice");
        }
        freed.tokens
    }

    /// Copies nodes to the host tier, from the top, until one does not fit.
    fn back_up(&mut self, nodes: &[Handle]) -> bool {
        for &node in nodes {
            let tokens = self.tree.backup_source(node).unwrap().len();
            if tokens == 0 {
                continue;
            }
            if self.host.len() < tokens {
                let freed = self.tree.evict_host(tokens - self.host.len(), false);
                self.free(freed);
            }
            if self.host.len() < tokens {
                return false;
            }
            let slots = (0..tokens).map(|_| self.host.pop_first().unwrap());
            let slots: Vec<_> = slots.collect();
            self.tree.commit_backup(node, slots).unwrap();
            self.tree.begin_write(&[node], node.0).unwrap();
            self.tree.finish_write(&[node], node.0).unwrap();
            self.copied += tokens;
        }
        true
    }

    fn evict(&mut self, tokens: usize) -> usize {
        let mut done = 0;
        self.tree.begin_walk(tokens);
        while let Some(leaf) = self.tree.next_leaf(done).unwrap() {
            match self.tree.take_leaf(leaf).unwrap() {
                LeafEnd::Gone(freed) => done += self.free(freed),
                LeafEnd::NeedsCopy(nodes) => {
                    if self.back_up(&nodes) {
                        let freed = self.tree.demote(leaf).unwrap();
                        done += self.free(freed);
                    } else if let Some(freed) = self.tree.drop_branch(leaf).unwrap() {
                        let device: usize = freed.device.iter().map(Vec::len).sum();
                        self.free(freed);
                        done += device;
                    }
                }
            }
        }
        self.tree.end_walk();
        done
    }

    /// One request, from its first look to its end; the tokens that it found on the device.
    fn ask(
        &mut self,
        program: Option<u64>,
        prompt: &[u32],
        hints: &Hints,
        answer: &[u32],
    ) -> usize {
        let program = program.map(ProgramId);
        let asker = |is_done, hints: &Hints| Asker {
            hints: Some(Arc::new(hints.clone())),
            prompt_tokens: u32::try_from(prompt.len()).unwrap(),
            arrived: self.now,
            is_done,
        };
        let askers = [asker(false, hints), asker(true, hints)];
        let found = self.tree.find_prefix(&SpaceName::default(), prompt);
        let (had, mut held) = (found.device_tokens, found.device);
        self.tree.lease(held).unwrap();
        let mut counted = 0;
        let whole: Vec<_> = prompt.iter().chain(answer).copied().collect();
        let parts = [prompt.len(), whole.len()];
        for (asker, end) in askers.into_iter().zip(parts) {
            let mut slots = self.tree.device_slots(held, self.tree.root()).unwrap();
            let owned = slots.len();
            let missing = end - owned;
            if self.device.len() < missing {
                self.evict(missing - self.device.len());
            }
            slots.extend((0..missing).map(|_| self.device.pop_first().expect("there is room")));
            let step = self.tree.begin_insert(Insertion {
                tokens: whole[..end].to_vec(),
                slots,
                owned,
                counted,
                program,
                asker: Some(asker),
                ..Insertion::default()
            });
            let step = step.unwrap();
            for action in step.actions {
                if let SlotAction::Free(slots) = action {
                    self.device.extend(slots);
                }
            }
            let last = step.result.expect("no backups are due").last;
            self.tree.lease(last).unwrap();
            self.tree.release(held).unwrap();
            (held, counted) = (last, end);
        }
        self.tree.release(held).unwrap();
        self.found += had;
        had
    }

    fn has(&self, tokens: &[u32]) -> usize {
        self.tree.peek_device(&SpaceName::default(), tokens).0
    }

    fn node(&self, tokens: &[u32]) -> Handle {
        self.tree.peek_device(&SpaceName::default(), tokens).1
    }
}

fn tokens(from: u32, count: u32) -> Vec<u32> {
    (from..from + count).collect()
}

fn says() -> Hints {
    Hints::default()
}

#[test]
fn what_a_program_went_on_without_goes_first() {
    let mut world = World::new(SlotPolicy::Agent, 40, 0, Host::None);
    world.at(10);
    world.ask(Some(1), &tokens(0, 8), &says(), &tokens(100, 4));
    world.ask(Some(2), &tokens(200, 8), &says(), &[]);
    // The next turn leaves the prefix before its end.
    let mut turn = tokens(0, 6);
    turn.extend(tokens(300, 6));
    world.at(20);
    world.ask(Some(1), &turn, &says(), &[]);
    assert_eq!(world.evict(6), 6);
    assert_eq!(world.has(&turn), 12);
    assert_eq!(world.has(&tokens(200, 8)), 8, "older, and yet it stays");
    assert_eq!(world.has(&tokens(0, 8)), 6);
}

#[test]
fn a_stripped_answer_goes_first_without_a_word_from_anybody() {
    let mut world = World::new(SlotPolicy::Agent, 60, 0, Host::None);
    world.at(10);
    world.ask(None, &tokens(500, 8), &says(), &[]);
    world.at(20);
    world.ask(None, &tokens(0, 8), &says(), &tokens(100, 5));
    let mut turn = tokens(0, 8);
    turn.extend(tokens(200, 6));
    world.at(21);
    world.ask(None, &turn, &says(), &tokens(300, 2));
    assert_eq!(world.evict(5), 5);
    assert_eq!(world.has(&tokens(500, 8)), 8);
    let mut old = tokens(0, 8);
    old.extend(tokens(100, 5));
    assert_eq!(world.has(&old), 8, "the answer is gone, and nothing else");
}

#[test]
fn what_may_be_the_answer_of_another_program_is_not_taken_for_stripped() {
    for (before, by, is_kept) in [(None, Some(2), false), (Some(1), Some(2), true)] {
        let mut world = World::new(SlotPolicy::Agent, 60, 0, Host::None);
        world.at(10);
        world.ask(None, &tokens(500, 8), &says(), &[]);
        world.at(20);
        world.ask(before, &tokens(0, 8), &says(), &tokens(100, 5));
        let mut turn = tokens(0, 8);
        turn.extend(tokens(200, 6));
        world.at(21);
        world.ask(by, &turn, &says(), &[]);
        let mut old = tokens(0, 8);
        old.extend(tokens(100, 5));
        let evicted = world.evict(5);
        let left = (world.has(&old), world.has(&tokens(500, 8)));
        let expected = if is_kept { (8, (13, 0)) } else { (5, (8, 8)) };
        assert_eq!((evicted, left), expected, "{before:?}");
    }
}

#[test]
fn a_last_request_leaves_nothing_that_others_have_to_make_room_for() {
    let mut world = World::new(SlotPolicy::Agent, 40, 0, Host::None);
    world.at(10);
    world.ask(Some(1), &tokens(0, 10), &says(), &[]);
    world.at(20);
    let last = Hints {
        session_final: true,
        ..says()
    };
    world.ask(Some(2), &tokens(100, 10), &last, &[]);
    assert_eq!(world.evict(10), 10);
    assert_eq!(world.has(&tokens(0, 10)), 10);
}

/// Programs that come round and round, one more of them than fit: least recently used finds
/// nothing, whatever it keeps.
#[test]
fn where_not_all_programs_fit_some_stay_whole() {
    let run = |policy| {
        let mut world = World::new(policy, 520, 0, Host::None);
        let mut now = 0;
        for round in 0..40 {
            for program in 0..30_u32 {
                now += 1;
                world.at(now);
                let prompt = tokens(1000 * program, 20);
                let id = Some(u64::from(program) + 1);
                let before = world.found;
                world.ask(id, &prompt, &says(), &[]);
                if round < 15 {
                    world.found = before;
                }
            }
        }
        world.found
    };
    let (lru, agent) = (run(SlotPolicy::Lru), run(SlotPolicy::Agent));
    let asked = 25 * 30 * 20;
    assert_eq!(lru, 0, "of {asked} tokens");
    assert!(agent * 4 > asked, "{agent} of {asked} tokens were found");
}

#[test]
fn what_is_found_again_is_a_hit_at_each_capacity_that_would_have_held_it() {
    let mut world = World::new(SlotPolicy::Agent, 64, 0, Host::None);
    for turn in 0..10 {
        world.at(turn);
        let prompt = tokens(100 * (u32::try_from(turn).unwrap() % 2), 20);
        world.ask(None, &prompt, &says(), &[]);
    }
    // Both prompts together are 40 tokens.
    for point in world.tree.learned(200, 160).unwrap().curve {
        let hits = (point.hit_tokens, point.lru_hit_tokens);
        match point.pages {
            0..20 => assert_eq!(hits, (0, 0), "{point:?}"),
            20..40 => assert!(hits.0 < 160, "{point:?}"),
            _ => assert_eq!(hits, (160, 160), "{point:?}"),
        }
    }
}

#[test]
fn kinds_are_nodes_of_their_own_and_learned_apart() {
    let mut world = World::new(SlotPolicy::Agent, 60, 0, Host::None);
    world.at(10);
    let hints = Hints {
        spans: vec![
            (4..7, ContextKind::Thinking),
            (7..9, ContextKind::Scratchpad),
        ],
        ..says()
    };
    world.ask(Some(1), &tokens(0, 10), &hints, &[]);
    let path = world.tree.path(world.node(&tokens(0, 10))).unwrap();
    let ends: Vec<_> = path.iter().map(|part| part.end).collect();
    assert_eq!(ends, [4, 7, 9, 10]);
    let mut lru = World::new(SlotPolicy::Lru, 60, 0, Host::None);
    lru.ask(Some(1), &tokens(0, 10), &hints, &[]);
    let path = lru.tree.path(lru.node(&tokens(0, 10))).unwrap();
    assert_eq!(path.len(), 1, "SGLang's own structure otherwise");
}

#[test]
fn what_is_retained_stays_until_it_idles_whatever_the_policy() {
    let policies = [
        SlotPolicy::Lru,
        SlotPolicy::Lfu,
        SlotPolicy::Priority,
        SlotPolicy::Mru,
        SlotPolicy::Agent,
    ];
    for policy in policies {
        let mut world = World::new(policy, 40, 0, Host::None);
        world.at(10);
        let hints = Hints {
            priority: 5,
            retention_s: Some(60),
            ..says()
        };
        world.ask(Some(1), &tokens(0, 8), &hints, &[]);
        world.at(20);
        world.ask(Some(2), &tokens(100, 8), &says(), &[]);
        world.at(60);
        assert_eq!(world.evict(8), 8);
        assert_eq!(world.has(&tokens(0, 8)), 8, "{policy:?}");
        // Used at 60, so it idles from then on.
        let found = world.tree.find_prefix(&SpaceName::default(), &tokens(0, 8));
        assert_eq!(found.device_tokens, 8);
        world.at(119);
        world.ask(Some(2), &tokens(100, 8), &says(), &[]);
        world.at(122);
        let younger = world.node(&tokens(100, 8));
        world.tree.retain(younger, 1, None).unwrap();
        assert_eq!(world.evict(8), 8);
        assert_eq!(world.has(&tokens(100, 8)), 8, "{policy:?}");
    }
}

#[test]
fn parts_of_a_prompt_are_retained_apart() {
    let mut world = World::new(SlotPolicy::Agent, 40, 0, Host::None);
    world.at(10);
    let strong = Retention {
        priority: 9,
        seconds: None,
    };
    let hints = Hints {
        retain: vec![(0..5, strong)],
        ..says()
    };
    world.ask(Some(1), &tokens(0, 8), &hints, &[]);
    world.at(11);
    world.ask(Some(2), &tokens(100, 8), &says(), &[]);
    assert_eq!(world.evict(11), 11);
    assert_eq!(world.has(&tokens(0, 8)), 5);
}

#[test]
fn a_pin_goes_to_the_host_tier_under_pressure_and_nobody_waits_for_it() {
    for (policy, kind) in [
        (SlotPolicy::Lru, Host::Through),
        (SlotPolicy::Lru, Host::Back),
        (SlotPolicy::Agent, Host::Through),
        (SlotPolicy::Agent, Host::Back),
    ] {
        let mut world = World::new(policy, 20, 40, kind);
        world.at(1);
        world.ask(Some(1), &tokens(0, 10), &says(), &[]);
        let node = world.node(&tokens(0, 10));
        assert_eq!(
            world.tree.pin(node, Some(ProgramId(1)), 100 * SECOND),
            Ok(10)
        );
        assert_eq!((world.tree.evictable(), world.tree.protected()), (10, 0));
        world.at(2);
        world.ask(None, &tokens(100, 8), &says(), &[]);
        assert_eq!(world.evict(8), 8);
        assert_eq!(world.has(&tokens(0, 10)), 10, "all else goes first");
        let copies = world.tree.copies_for_pin(node).unwrap();
        assert_eq!(copies.is_empty(), kind == Host::Back);
        // The whole device for another prompt, and then a flood of the host tier.
        world.ask(None, &tokens(200, 20), &says(), &[]);
        assert_eq!(world.has(&tokens(0, 10)), 0);
        for k in 0..6 {
            world.at(3 + k);
            let flood = tokens(1000 * (1 + u32::try_from(k).unwrap()), 20);
            world.ask(None, &flood, &says(), &[]);
        }
        let found = world
            .tree
            .find_prefix(&SpaceName::default(), &tokens(0, 10));
        assert_eq!(found.host_tokens, 10, "{policy:?}: it is still there");
        assert_eq!((world.tree.pinned(), world.tree.lost()), (10, 0));
        world.at(100);
        assert_eq!(world.tree.pinned(), 0);
        let freed = world.tree.evict_host(1000, false);
        world.free(freed);
        let found = world
            .tree
            .find_prefix(&SpaceName::default(), &tokens(0, 10));
        assert_eq!(found.tokens, 0, "the pin is over");
        world.tree.check().unwrap();
    }
}

#[test]
fn a_pin_that_no_tier_has_room_for_is_lost_and_counted_and_blocks_nothing() {
    let mut world = World::new(SlotPolicy::Lru, 20, 8, Host::Back);
    world.at(1);
    world.ask(None, &tokens(0, 4), &says(), &[]);
    let node = world.node(&tokens(0, 4));
    assert_eq!(world.tree.pin(node, None, 100 * SECOND), Ok(4));
    // What is on the host tier is held by a load.
    world.ask(None, &tokens(50, 8), &says(), &[]);
    world.evict(8);
    let other = world
        .tree
        .find_prefix(&SpaceName::default(), &tokens(50, 8));
    let receipt = world.tree.lease_host(other.best).unwrap().unwrap();
    world.ask(None, &tokens(100, 20), &says(), &[]);
    assert_eq!((world.tree.pinned(), world.tree.lost()), (0, 4));
    world.tree.release_host(other.best, receipt).unwrap();
    world.tree.check().unwrap();
}

#[test]
fn prefixes_of_a_program_are_found_by_its_name() {
    let mut world = World::new(SlotPolicy::Agent, 60, 0, Host::None);
    world.ask(Some(1), &tokens(0, 8), &says(), &tokens(8, 2));
    world.ask(Some(1), &tokens(0, 12), &says(), &tokens(12, 2));
    world.ask(Some(1), &tokens(50, 6), &says(), &[]);
    let ends = world.tree.ends_of(ProgramId(1));
    let paths: Vec<_> = ends
        .iter()
        .map(|&end| world.tree.path(end).unwrap().last().unwrap().end)
        .collect();
    assert_eq!(paths, [14, 6], "no end within another");
    world.evict(3);
    let ends = world.tree.ends_of(ProgramId(1));
    let left: usize = ends
        .iter()
        .map(|&end| world.tree.path(end).unwrap().last().unwrap().end)
        .sum();
    assert!(left > 8, "what is left of a prefix is still the program's");
    assert!(world.tree.ends_of(ProgramId(2)).is_empty());
}

#[test]
fn random_programs_lose_no_slot_on_any_tier() {
    for seed in 0..12 {
        let mut random = Random(seed);
        let kinds = [Host::None, Host::Through, Host::Back];
        let kind = kinds[usize::try_from(random.below(3)).unwrap()];
        let policies = [SlotPolicy::Agent, SlotPolicy::Agent, SlotPolicy::Lru];
        let policy = policies[usize::try_from(random.below(3)).unwrap()];
        let host = if kind == Host::None { 0 } else { 30 };
        let mut world = World::new(policy, 64, host, kind);
        let below = |random: &mut Random, n| u32::try_from(random.below(n)).unwrap();
        for step in 0..120 {
            world.at(step * (1 + random.below(9)));
            let program = 1 + random.below(4);
            let key = |random: &mut Random, most| -> Vec<u32> {
                (0..1 + random.below(most))
                    .map(|_| below(random, 2))
                    .collect()
            };
            let prompt = key(&mut random, 12);
            match random.below(8) {
                0 => {
                    let node = world.node(&prompt);
                    let until = world.now + random.below(50) * SECOND;
                    let owner = Some(ProgramId(program));
                    world.tree.pin(node, owner, until).unwrap();
                    let copies = world.tree.copies_for_pin(node).unwrap();
                    world.back_up(&copies);
                }
                1 => {
                    world.tree.release_program(ProgramId(program));
                }
                2 => {
                    world.evict(usize::try_from(1 + random.below(20)).unwrap());
                }
                3 => {
                    for end in world.tree.ends_of(ProgramId(program)) {
                        let priority = i32::try_from(random.below(5)).unwrap() - 2;
                        world.tree.retain(end, priority, Some(20)).unwrap();
                    }
                }
                _ => {
                    let hints = Hints {
                        osl: Some(below(&mut random, 900)),
                        iat_ms: (random.below(2) == 0).then(|| below(&mut random, 9000)),
                        session_final: random.below(9) == 0,
                        retention_s: Some(5),
                        priority: i32::try_from(random.below(3)).unwrap(),
                        spans: vec![(2..4, ContextKind::Thinking)],
                        ..says()
                    };
                    let answer = key(&mut random, 4);
                    world.ask(Some(program), &prompt, &hints, &answer);
                }
            }
            world.tree.check().unwrap();
            let held = usize::try_from(world.tree.device_tokens()).unwrap();
            assert_eq!(held + world.device.len(), 64, "seed {seed}, step {step}");
        }
        world.at(100_000);
        world.evict(64);
        let freed = world.tree.evict_host(64, false);
        world.free(freed);
        assert_eq!((world.device.len(), world.host.len()), (64, host as usize));
    }
}
