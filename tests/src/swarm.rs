//! What a simulation is made of, chosen by its seed: sizes, policies, traffic, faults. Each seed
//! switches some things off and weights the rest wildly, so that rare mixtures come up.

use rootstock::RouterConfig;
use rootstock_memory::ReplicaId;
use rootstock_radix::{CacheConfig, PolicyKind, WritePolicy};
use rootstock_scheduler::router::{Affinity, Mode, Overload, QueueOrder};
use rootstock_scheduler::{SchedulePolicy, SchedulerConfig};

use crate::rng::Rng;

/// One simulated world.
#[derive(Clone, Debug)]
pub struct Swarm {
    /// Everything follows from it.
    pub seed: u64,
    /// Steps with traffic; afterwards the world runs dry.
    pub steps: u32,
    /// Scheduler under test.
    pub scheduler: SchedulerConfig,
    /// Cache under test.
    pub cache: CacheConfig,
    /// Router under test.
    pub router: RouterConfig,
    /// Chance of an arrival a step, in percent; above 100 several.
    pub arrivals: u32,
    /// Most requests live at a time, so that a run stays small.
    pub live_max: usize,
    /// Shared prefixes to start from.
    pub families: u32,
    /// Longest fresh part of a prompt, in tokens.
    pub fresh_max: u32,
    /// Most output tokens asked for.
    pub output_max: u32,
    /// Chance that an arrival continues a conversation.
    pub turns: u32,
    /// Priorities are in `-spread..=spread`.
    pub priority_spread: u32,
    /// Strict tiers are in `0..=spread`.
    pub strict_spread: u32,
    /// Jumps up to this many seconds.
    pub jump_max: u32,
    /// Chance that a request samples instead of being greedy.
    pub sampled: u32,
    /// Chance that a request has penalties.
    pub penalties: u32,
    /// Chance that a request may not stop before some tokens.
    pub minimums: u32,
    /// Chance that a request has a deadline.
    pub deadlines: u32,
    /// Chance that a request is speculative.
    pub speculative: u32,
    /// Chance a step that some live request is aborted.
    pub aborts: u32,
    /// Chance a step that some live request is ended by its caller.
    pub stop_strings: u32,
    /// Chance that a step fails.
    pub failures: u32,
    /// Chance a step that the oldest step in flight is completed although another could be
    /// launched.
    pub early_results: u32,
    /// Chance that two results arrive in the wrong order.
    pub swapped_results: u32,
    /// Most nanoseconds of a step.
    pub step_ns_max: u32,
    /// Chance of a jump of the clock by minutes.
    pub clock_jumps: u32,
    /// Most steps a copy takes.
    pub copy_delay_max: u32,
    /// Chance that a copy fails.
    pub copy_failures: u32,
    /// Chance that a request pins.
    pub pins: u32,
    /// Longest pin, in seconds.
    pub pin_ttl_max: u32,
    /// Chance a step of a verb on a conversation.
    pub acts: u32,
    /// Turns between two recounts.
    pub check_every: u32,
}

impl Swarm {
    /// The world of a seed.
    pub fn of(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x0051_4d00);
        let page_tokens = *rng.pick(&[1, 1, 2, 3, 4, 16, 64]);
        let pages = match rng.below(3) {
            0 => rng.between(2, 8),
            1 => rng.between(8, 40),
            _ => rng.between(40, 200),
        };
        let scale = page_tokens * pages;
        let scheduler = able(seed, scheduler_of(&mut rng, page_tokens, scale));
        let cache = cache_of(&mut rng, page_tokens, pages);
        let mut some = |percent: u32, most: u32| -> u32 {
            if rng.percent(percent) {
                rng.between(1, most)
            } else {
                0
            }
        };
        Self {
            seed,
            steps: 300,
            arrivals: 20 + some(70, 200),
            live_max: 4 + some(80, 40) as usize,
            families: 1 + some(70, 5),
            fresh_max: 1 + some(90, (scale / 2).clamp(2, 200)),
            output_max: 1 + some(90, (scale / 2).clamp(2, 60)),
            turns: some(60, 80),
            priority_spread: some(60, 10),
            strict_spread: some(30, 3),
            jump_max: some(50, 60),
            sampled: some(50, 100),
            penalties: some(30, 50),
            minimums: some(30, 50),
            deadlines: some(20, 20),
            speculative: some(30, 30),
            aborts: some(60, 30),
            stop_strings: some(40, 20),
            failures: some(30, 10),
            early_results: some(70, 100),
            swapped_results: some(30, 50),
            step_ns_max: 1 + some(90, 2_000_000_000),
            clock_jumps: some(10, 3),
            copy_delay_max: some(60, 20),
            copy_failures: some(40, 40),
            pins: some(50, 60),
            pin_ttl_max: some(90, 600),
            acts: some(40, 20),
            check_every: 1 + u32::try_from(seed % 3).unwrap_or(0),
            router: router_of(seed),
            scheduler,
            cache,
        }
    }
}

impl Swarm {
    /// By themselves, or with a copy that they stand on.
    pub(crate) fn steps_may_fail(&self) -> bool {
        self.failures > 0 || self.scheduler.begin_in_transit && self.copy_failures > 0
    }
}

/// What the backend can do, drawn from a generator of its own.
fn able(seed: u64, scheduler: SchedulerConfig) -> SchedulerConfig {
    let mut rng = Rng::new(seed ^ 0x6162_6c65);
    SchedulerConfig {
        late_history: rng.percent(50),
        begin_in_transit: rng.percent(60),
        ..scheduler
    }
}

/// Drawn from a generator of its own.
fn router_of(seed: u64) -> RouterConfig {
    let mut rng = Rng::new(seed ^ 0x0072_7472);
    RouterConfig {
        mode: *rng.pick(&[
            Mode::Kv,
            Mode::Kv,
            Mode::Kv,
            Mode::RoundRobin,
            Mode::Random,
            Mode::PowerOfTwo,
            Mode::LeastLoaded,
        ]),
        temperature: *rng.pick(&[0.0, 0.0, 1.0]),
        queue_threshold: *rng.pick(&[None, None, Some(0.0), Some(0.5), Some(4.0)]),
        queue_order: *rng.pick(&[QueueOrder::Fcfs, QueueOrder::Wspt]),
        track_output_blocks: rng.percent(50),
        overload: Overload {
            decode_blocks: *rng.pick(&[None, None, Some(0.9)]),
            prefill_tokens: *rng.pick(&[None, None, Some(100)]),
            prefill_frac: None,
        },
        stale_after_s: *rng.pick(&[0, 5, 300]),
        affinity_ttl_s: *rng.pick(&[0, 0, 60]),
        affinity: *rng.pick(&[Affinity::Soft, Affinity::Hard]),
        ..RouterConfig::default()
    }
}

fn cache_of(rng: &mut Rng, page_tokens: u32, pages: u32) -> CacheConfig {
    let replicas = *rng.pick(&[1, 1, 1, 2, 3]);
    CacheConfig {
        page_tokens,
        device_pages: (0..replicas).map(|n| pages + n * pages / 2).collect(),
        host_pages: match rng.below(4) {
            0 => 0,
            1 => rng.between(1, pages.div_ceil(2)),
            2 => pages,
            _ => pages * 4,
        },
        policy: *rng.pick(&[
            PolicyKind::Lru,
            PolicyKind::Priority,
            PolicyKind::Lfu,
            PolicyKind::Slru,
            PolicyKind::Agent,
        ]),
        write_policy: *rng.pick(&[
            WritePolicy::Through,
            WritePolicy::Selective,
            WritePolicy::Back,
        ]),
        pin_budget: *rng.pick(&[0.0, 0.25, 0.5, 1.0]),
        max_copies: *rng.pick(&[1, 3, 16, 64]),
        max_nodes: if rng.percent(10) { 8 } else { 1 << 14 },
        ..CacheConfig::default()
    }
}

fn scheduler_of(rng: &mut Rng, page_tokens: u32, scale: u32) -> SchedulerConfig {
    SchedulerConfig {
        replica: ReplicaId(0),
        page_tokens,
        max_running: *rng.pick(&[1, 2, 3, 8, 32]),
        max_queue: *rng.pick(&[1, 4, 64]),
        step_tokens: *rng.pick(&[1, 2, 7, 16, 64, 512]),
        max_model_len: *rng.pick(&[scale.max(2), scale / 2 + 2, scale * 2]),
        policy: *rng.pick(&[
            SchedulePolicy::Fcfs,
            SchedulePolicy::Lpm,
            SchedulePolicy::Lof,
            SchedulePolicy::DfsWeight,
            SchedulePolicy::Priority,
            SchedulePolicy::Priority,
        ]),
        aging_s: *rng.pick(&[0.0, 0.5, 30.0]),
        preempt_gap: *rng.pick(&[None, Some(0), Some(1), Some(3)]),
        max_in_flight: *rng.pick(&[1, 1, 2, 3]),
        max_preemptions: *rng.pick(&[0, 1, 4, 16]),
        queue_timeout_s: *rng.pick(&[0, 5, 600]),
        max_drafts: *rng.pick(&[0, 0, 1, 4]),
        prompt_lookup: rng.percent(50),
        prefill_ns_per_token: *rng.pick(&[0, 1_000_000, 100_000_000]),
        copy_ns: *rng.pick(&[0, 1_000_000]),
        copy_ns_per_page: *rng.pick(&[0, 100_000, 10_000_000]),
        target_step_ms: *rng.pick(&[0, 0, 1, 500]),
        overtake: rng.percent(70),
        late_history: false,
        begin_in_transit: false,
        fair_shares: rng.percent(50),
        program_wait_s: *rng.pick(&[0.0, 0.5, 60.0]),
    }
}
