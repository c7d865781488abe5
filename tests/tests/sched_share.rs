//! Prefixes shared while they are computed, and the step in flight that still reads the old page.

use rootstock_scheduler::SchedulerConfig;
use rootstock_tests::world::{World, prompt};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        page_tokens: 1,
        step_tokens: 8,
        ..SchedulerConfig::default()
    }
}

// Faults A4: two requests compute the same prefix at once.

#[test]
fn two_that_computed_the_same_prefix_end_with_one_copy_and_their_own_texts() {
    for in_flight in [1, 2, 3] {
        for budget in [4, 8, 16] {
            let config = SchedulerConfig {
                step_tokens: budget,
                max_in_flight: in_flight,
                ..config()
            };
            let mut world = World::new(64, config);
            let a = world.submit(&prompt(1, 8), 6, 0);
            let b = world.submit(&prompt(1, 8), 6, 0);
            world.step();
            world.step();
            let c = world.submit(&prompt(2, 8), 6, 0);
            world.run_dry();
            assert!(
                [a, b, c].iter().all(|&id| world.said_all(id)),
                "{in_flight} {budget}"
            );
            assert_eq!(world.heard(a).tokens, world.heard(b).tokens);
            // 8 prompt tokens and 5 outputs of a = b, and as many of c.
            let cached = world.available() - world.cache.stats().tiers[0].free;
            assert_eq!(
                cached, 26,
                "one copy of each, {in_flight} in flight, budget {budget}"
            );
        }
    }
}

#[test]
fn a_prefill_takes_over_what_another_computed_meanwhile() {
    let config = SchedulerConfig {
        page_tokens: 4,
        step_tokens: 16,
        ..config()
    };
    let mut world = World::new(200, config);
    let mut first = prompt(1, 64);
    first.extend(prompt(2, 8));
    let mut second = prompt(1, 64);
    second.extend(prompt(3, 8));
    let a = world.submit(&first, 4, 0);
    let b = world.submit(&second, 4, 0);
    let mut computed = 0;
    while !world.scheduler.is_idle() {
        computed += world.step().iter().map(|row| row.2).sum::<u32>();
    }
    assert!(world.said_all(a) && world.said_all(b));
    assert!(world.scheduler.stats().shared_tokens + u64::from(world.usage(b).cached.total()) > 0);
    assert!(
        computed < 2 * 72 - 32,
        "computed {computed} of 144 prompt tokens and 6 more"
    );
    world.at_rest();
}

#[test]
fn a_follower_starts_on_pages_of_a_prompt_that_is_still_being_computed() {
    let config = SchedulerConfig {
        page_tokens: 4,
        step_tokens: 16,
        ..config()
    };
    let mut world = World::new(200, config);
    let a = world.submit(&prompt(1, 64), 4, 0);
    world.step();
    world.step();
    let b = world.submit(&prompt(1, 64), 4, 5);
    world.step();
    assert_eq!(
        world.heard(b).started,
        Some(32),
        "two chunks of the other's prompt"
    );
    world.run_dry();
    assert!(world.said_all(a) && world.said_all(b));
}

#[test]
fn a_whole_prompt_in_the_cache_still_computes_one_token() {
    for page in [1, 3, 16] {
        for len in [1, page.max(2) - 1, page, page + 1, 4 * page] {
            let config = SchedulerConfig {
                page_tokens: page,
                ..SchedulerConfig::default()
            };
            let mut world = World::new(300 / page, config);
            let mut texts = Vec::new();
            for round in 0..3 {
                let id = world.submit(&prompt(1, len), 5, 0);
                world.run_dry();
                let hit = world.usage(id).cached.total();
                let most = (len - 1) / page * page;
                assert_eq!(
                    hit,
                    if round == 0 { 0 } else { most },
                    "page {page}, {len} tokens"
                );
                texts.push(world.heard(id).tokens.clone());
            }
            assert!(texts.iter().all(|text| *text == texts[0]));
        }
    }
}

#[test]
fn identical_prompts_that_arrive_together_are_computed_once() {
    for in_flight in [1, 2] {
        let config = SchedulerConfig {
            page_tokens: 4,
            step_tokens: 64,
            max_in_flight: in_flight,
            ..SchedulerConfig::default()
        };
        let mut world = World::new(400, config);
        let ids: Vec<_> = (0..8)
            .map(|_| world.submit(&prompt(1, 101), 1, 0))
            .collect();
        let mut computed = 0;
        while !world.scheduler.is_idle() || world.engine.in_flight() > 0 {
            computed += world.step().iter().map(|row| row.2).sum::<u32>();
        }
        assert!(ids.iter().all(|&id| world.said_all(id)));
        assert_eq!(
            computed,
            101 + 7,
            "the prompt once, and one token each for the others"
        );
        world.at_rest();
    }
}
