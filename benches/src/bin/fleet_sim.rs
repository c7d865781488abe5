//! The agent fleet on the whole core in virtual time:
//! `fleet_sim thrash|router [PROGRAMS [BASE_MS TOKEN_US DRAW_US ONE_NS CHUNK_NS]]`.
//!
//! `thrash`: one replica with a third of the fleet's working set; program-aware admission off and
//! on with several bounds of the wait. `router`: four replicas; the modes of the router, and
//! affinity.
//!
//! Closed loop: 128 programs run at once, the next turn of each comes its tool's time after the
//! last one ended, and a program that has ended is replaced. Steps take what a linear model says:
//! the figures given, such as `rootstock replay --exact` tells of a recorded run; they are
//! printed.
#![expect(clippy::print_stdout, reason = "a program for people")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times and ranks of a simulation are positive and far below 2^53"
)]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use rootstock::memory::{CopyDone, Nanos, ReplicaId};
use rootstock::radix::{CacheConfig, Hints, NamespaceId, NamespaceKey, PolicyKind};
use rootstock::scheduler::router::{Affinity, Mode};
use rootstock::scheduler::{
    Admission, Emit, NewRequest, RequestId, RowOut, SchedulerConfig, StepLoad, StepOutput, StepPlan,
};
use rootstock::{CoreConfig, Limits, RouterConfig, ServingCore};
use rootstock_benches::fleet::Fleet;
use rootstock_benches::workload::Request;

const PAGE_TOKENS: u32 = 16;
const ACTIVE: usize = 128;
const SECOND: f64 = 1e9;

/// A step: milliseconds, microseconds for a token computed and for one drawn, nanoseconds for a KV
/// position read by a decode and by a chunk.
const STEP: [f64; 5] = [8.0, 40.0, 500.0, 60.0, 6.0];

/// What is simulated.
#[derive(Clone, Debug)]
struct Setup {
    name: String,
    device_tokens: u32,
    replicas: usize,
    program_wait_s: f64,
    router: RouterConfig,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
struct Outcome {
    seconds: f64,
    finished: usize,
    prompt_tokens: u64,
    cached_tokens: u64,
    longest_wait_s: f64,
    ttft_s: Vec<f64>,
    turn_s: Vec<f64>,
    busy_s: Vec<f64>,
}

/// A program's requests in order, with the seconds after each until the next.
type Turns = Vec<(usize, f64)>;

/// What happens at a time; the number makes the order total.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum What {
    Arrive { program: usize, turn: usize },
    Step { replica: usize },
    Wake,
}

struct Live {
    program: usize,
    turn: usize,
    arrival: Nanos,
    tokens: Vec<u32>,
    spoke: bool,
}

struct Sim<'a> {
    fleet: &'a Fleet,
    turns: &'a [Turns],
    core: ServingCore,
    ns: NamespaceId,
    step: [f64; 5],
    events: BinaryHeap<Reverse<(Nanos, u64, What)>>,
    number: u64,
    now: Nanos,
    live: BTreeMap<RequestId, Live>,
    flying: Vec<Option<StepPlan>>,
    next_program: usize,
    out: Outcome,
}

fn main() {
    let word = |n: usize| std::env::args().nth(n);
    let programs = word(2).and_then(|n| n.parse().ok()).unwrap_or(300);
    let figure = |n: usize| word(n + 3).and_then(|f| f.parse().ok()).unwrap_or(STEP[n]);
    let step = [0, 1, 2, 3, 4].map(figure);
    let fleet = Fleet::new(1);
    let turns = turns_of(&fleet, programs);
    let working_set = working_set(&fleet, &turns);
    println!(
        "{} programs, {ACTIVE} at a time, which hold {working_set} tokens in the mean; a step: \
         {step:?} (ms, us a token, us a draw, ns a KV position of a decode, of a chunk)",
        turns.len(),
    );
    let setups = match word(1).as_deref() {
        Some("router") => router_setups(working_set),
        Some(_) | None => thrash_setups(working_set),
    };
    println!(
        "| setup | finished programs an hour | hit ratio | TTFT p50 / p95 / p99 s | \
         turn p50 / p95 s | longest wait s | busy |\n|---|---|---|---|---|---|---|"
    );
    for setup in setups {
        let outcome = simulate(&fleet, &turns, &setup, step);
        print_row(&setup.name, outcome);
    }
}

fn thrash_setups(working_set: u32) -> Vec<Setup> {
    let setup = |name: &str, share: u32, program_wait_s| Setup {
        name: name.to_owned(),
        device_tokens: working_set / share,
        replicas: 1,
        program_wait_s,
        router: RouterConfig::default(),
    };
    vec![
        setup("room for all", 1, 0.0),
        setup("a third, off", 3, 0.0),
        setup("a third, wait at most 15 s", 3, 15.0),
        setup("a third, wait at most 60 s", 3, 60.0),
        setup("a third, wait at most 300 s", 3, 300.0),
        setup("a third, wait at most 1800 s", 3, 1800.0),
    ]
}

fn router_setups(working_set: u32) -> Vec<Setup> {
    let setup = |name: &str, router: RouterConfig| Setup {
        name: name.to_owned(),
        device_tokens: working_set / 4,
        replicas: 4,
        program_wait_s: 0.0,
        router,
    };
    let of = |mode| RouterConfig {
        mode,
        ..RouterConfig::default()
    };
    let affinity = |affinity| RouterConfig {
        affinity,
        affinity_ttl_s: 600,
        ..RouterConfig::default()
    };
    vec![
        setup("kv", of(Mode::Kv)),
        setup("kv, soft affinity", affinity(Affinity::Soft)),
        setup("kv, hard affinity", affinity(Affinity::Hard)),
        setup(
            "kv, credit 2, scale 4, request weight 64",
            RouterConfig {
                overlap_score_credit: 2.0,
                prefill_load_scale: 4.0,
                decode_active_request_weight: 64.0,
                ..RouterConfig::default()
            },
        ),
        setup(
            "kv, queue threshold 1",
            RouterConfig {
                queue_threshold: Some(1.0),
                ..RouterConfig::default()
            },
        ),
        setup("least-loaded", of(Mode::LeastLoaded)),
        setup("power-of-two", of(Mode::PowerOfTwo)),
        setup("round-robin", of(Mode::RoundRobin)),
        setup("random", of(Mode::Random)),
    ]
}

fn turns_of(fleet: &Fleet, programs: usize) -> Vec<Turns> {
    let mut turns: Vec<Turns> = Vec::new();
    for (index, note) in fleet.notes.iter().enumerate() {
        let program = note.program as usize;
        if turns.len() <= program {
            turns.resize(program + 1, Vec::new());
        }
        let request = &fleet.workload.requests[index];
        let output = f64::from(request.total_len - request.prompt_len);
        let pause_s = note.gap_s.map_or(0.0, |gap| gap - 0.2 - 0.02 * output);
        turns[program].push((index, pause_s.max(0.0)));
    }
    turns.truncate(programs);
    turns
}

/// Tokens that the programs under way hold at their largest, the shared beginning once: a mean of
/// half their final length, for as many as run at a time.
fn working_set(fleet: &Fleet, turns: &[Turns]) -> u32 {
    let requests = &fleet.workload.requests;
    let all: u64 = turns
        .iter()
        .flatten()
        .map(|&(index, _)| u64::from(requests[index].total_len.saturating_sub(4096)))
        .sum();
    let count = turns.iter().map(Vec::len).sum::<usize>().max(1) as u64;
    u32::try_from(all / count * ACTIVE as u64 + 4096).unwrap_or(u32::MAX)
}

fn simulate(fleet: &Fleet, turns: &[Turns], setup: &Setup, step: [f64; 5]) -> Outcome {
    let config = CoreConfig {
        cache: CacheConfig {
            page_tokens: PAGE_TOKENS,
            device_pages: vec![setup.device_tokens / PAGE_TOKENS; setup.replicas],
            policy: PolicyKind::Lru,
            ..CacheConfig::default()
        },
        scheduler: SchedulerConfig {
            page_tokens: PAGE_TOKENS,
            max_running: 64,
            max_queue: 4096,
            step_tokens: 2048,
            max_model_len: 131_072,
            queue_timeout_s: 0,
            program_wait_s: setup.program_wait_s,
            ..SchedulerConfig::default()
        },
        limits: Limits::default(),
        router: setup.router.clone(),
    };
    let mut core = match ServingCore::new(config) {
        Ok(core) => core,
        Err(error) => {
            println!("{}: {error}", setup.name);
            return Outcome::default();
        }
    };
    let key = NamespaceKey {
        model: "fleet".to_owned(),
        numerics: String::new(),
        lora: None,
        salt: None,
    };
    let Ok(ns) = core.namespace(&key) else {
        return Outcome::default();
    };
    let mut sim = Sim {
        fleet,
        turns,
        core,
        ns,
        step,
        events: BinaryHeap::new(),
        number: 0,
        now: 1,
        live: BTreeMap::new(),
        flying: (0..setup.replicas).map(|_| None).collect(),
        next_program: 0,
        out: Outcome {
            busy_s: vec![0.0; setup.replicas],
            ..Outcome::default()
        },
    };
    sim.run();
    sim.out
}

impl Sim<'_> {
    fn run(&mut self) {
        for n in 0..ACTIVE {
            self.start_program(SECOND * n as f64 * 0.4);
        }
        while let Some(Reverse((at, _, what))) = self.events.pop() {
            self.now = self.now.max(at);
            match what {
                What::Arrive { program, turn } => self.arrive(program, turn),
                What::Step { replica } => self.land(replica),
                What::Wake => {}
            }
            self.core.tick(self.now);
            self.hear();
            for replica in 0..self.flying.len() {
                self.launch(replica);
            }
            self.hear();
            let idle = self.flying.iter().all(Option::is_none);
            if let Some(due) = self.core.due_at().filter(|_| idle) {
                self.push(due.max(self.now + 1), What::Wake);
            }
            if self.out.finished == self.turns.len() {
                break;
            }
        }
        let stats = self.core.stats();
        for scheduler in &stats.schedulers {
            self.out.prompt_tokens += scheduler.prompt_tokens;
            self.out.cached_tokens += scheduler.cached_tokens;
        }
        self.out.seconds = self.now as f64 / SECOND;
        self.core.end_all(self.now);
    }

    fn push(&mut self, at: Nanos, what: What) {
        self.number += 1;
        self.events.push(Reverse((at, self.number, what)));
    }

    fn start_program(&mut self, at_ns: f64) {
        if self.next_program < self.turns.len() {
            let program = self.next_program;
            self.next_program += 1;
            self.push(at_ns as Nanos + 1, What::Arrive { program, turn: 0 });
        }
    }

    fn request(&self, program: usize, turn: usize) -> &Request {
        &self.fleet.workload.requests[self.turns[program][turn].0]
    }

    fn arrive(&mut self, program: usize, turn: usize) {
        let request = self.request(program, turn);
        let mut tokens = Vec::with_capacity(request.total_len as usize);
        request.tokens(&mut tokens);
        let prompt = request.prompt_len as usize;
        let new = NewRequest {
            ignore_eos: true,
            hints: Hints {
                program: Some(format!("p{program}")),
                session_final: turn + 1 == self.turns[program].len(),
                ..Hints::default()
            },
            ..NewRequest::new(
                self.ns,
                tokens[..prompt].to_vec(),
                request.total_len - request.prompt_len,
            )
        };
        match self.core.add(new, self.now) {
            Admission::Admitted(id) => {
                let live = Live {
                    program,
                    turn,
                    arrival: self.now,
                    tokens: tokens.split_off(prompt),
                    spoke: false,
                };
                self.live.insert(id, live);
            }
            Admission::Deferred { retry_after_s, .. } => {
                let at = self.now + u64::from(retry_after_s) * 1_000_000_000;
                self.push(at, What::Arrive { program, turn });
            }
            Admission::Rejected(reason) => println!("program {program}, turn {turn}: {reason}"),
        }
    }

    fn launch(&mut self, replica: usize) {
        if self.flying[replica].is_some() {
            return;
        }
        let id = ReplicaId(u16::try_from(replica).unwrap_or(0));
        let Some(plan) = self.core.schedule(id, self.now) else {
            return;
        };
        let load = StepLoad::of(
            plan.rows
                .iter()
                .map(|row| (row.first_pos, row.len, row.sample.is_some())),
        );
        let [base_ms, token_us, draw_us, one_ns, chunk_ns] = self.step;
        let us = token_us * f64::from(load.tokens) + draw_us * f64::from(load.draws);
        let kv_ns = one_ns * load.kv_one as f64 + chunk_ns * load.kv_chunk as f64;
        let ns = base_ms * 1e6 + us * 1e3 + kv_ns;
        self.out.busy_s[replica] += ns / SECOND;
        self.flying[replica] = Some(plan);
        self.push(self.now + ns as Nanos, What::Step { replica });
    }

    fn land(&mut self, replica: usize) {
        let Some(plan) = self.flying[replica].take() else {
            return;
        };
        for copy in &plan.copies {
            let (id, ok) = (copy.id, true);
            self.core.copy_done(CopyDone { id, ok }, self.now);
        }
        let rows = plan.rows.iter().map(|row| {
            let mut out = RowOut::default();
            if let Some(sample) = &row.sample {
                let live = self.live.get(&row.request);
                let said = live.and_then(|live| live.tokens.get(sample.output_index as usize));
                out.accepted.push(said.copied().unwrap_or(0));
            }
            out
        });
        let output = StepOutput {
            rows: rows.collect(),
        };
        self.core.complete(plan.replica, plan.id, &output, self.now);
    }

    fn hear(&mut self) {
        let mut emits = Vec::new();
        self.core.drain_emits(&mut emits);
        for emit in emits {
            let Some(live) = self.live.get_mut(&emit.request()) else {
                continue;
            };
            match emit {
                Emit::Started { .. } => {}
                Emit::Tokens { .. } if live.spoke => {}
                Emit::Tokens { .. } => {
                    live.spoke = true;
                    let ttft = self.now - live.arrival;
                    self.out.ttft_s.push(ttft as f64 / SECOND);
                }
                Emit::Final { request, usage, .. } => {
                    let (program, turn) = (live.program, live.turn);
                    let took = self.now - live.arrival;
                    self.out.turn_s.push(took as f64 / SECOND);
                    let wait_s = usage.queue_ns as f64 / SECOND;
                    self.out.longest_wait_s = self.out.longest_wait_s.max(wait_s);
                    self.live.remove(&request);
                    self.go_on(program, turn);
                }
            }
        }
    }

    fn go_on(&mut self, program: usize, turn: usize) {
        let pause_ns = self.turns[program][turn].1 * SECOND;
        let at_ns = self.now as f64 + pause_ns;
        if turn + 1 < self.turns[program].len() {
            let turn = turn + 1;
            self.push(at_ns as Nanos, What::Arrive { program, turn });
        } else {
            self.out.finished += 1;
            self.start_program(self.now as f64 + SECOND);
        }
    }
}

fn print_row(name: &str, mut outcome: Outcome) {
    let mut at = |part: f64, of: fn(&mut Outcome) -> &mut Vec<f64>| {
        let list = of(&mut outcome);
        list.sort_by(f64::total_cmp);
        let index = (list.len() as f64 * part) as usize;
        list.get(index.min(list.len().saturating_sub(1)))
            .copied()
            .unwrap_or(0.0)
    };
    let ttft = [0.5, 0.95, 0.99].map(|part| at(part, |o| &mut o.ttft_s));
    let turn = [0.5, 0.95].map(|part| at(part, |o| &mut o.turn_s));
    let busy: Vec<String> = outcome
        .busy_s
        .iter()
        .map(|busy| format!("{:.2}", busy / outcome.seconds.max(1e-9)))
        .collect();
    println!(
        "| {name} | {:.0} | {:.4} | {:.2} / {:.2} / {:.2} | {:.1} / {:.1} | {:.0} | {} |",
        outcome.finished as f64 / outcome.seconds * 3600.0,
        outcome.cached_tokens as f64 / outcome.prompt_tokens.max(1) as f64,
        ttft[0],
        ttft[1],
        ttft[2],
        turn[0],
        turn[1],
        outcome.longest_wait_s,
        busy.join(" "),
    );
}
