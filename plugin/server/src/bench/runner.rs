//! When what is asked: programs side by side, each call after the answer to the one before.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::client::Target;
use super::report::Call;
use super::script::{Draws, HIGH, LOW, MEDIUM, Manner, Talk};
use super::{AgentFlags, Scenario};

/// Output tokens of the calls of the graph: those side by side, the one that joins, the last.
const NAT_OUTPUT: [u32; 4] = [20, 500, 100, 20];
/// Calls side by side in the graph.
const NAT_WIDTH: u32 = 4;

/// What all programs of a run share.
struct Run {
    flags: AgentFlags,
    target: Target,
    begin: Instant,
    calls: Mutex<Vec<Call>>,
    bar: ProgressBar,
    /// The user-facing programs are done.
    over: AtomicBool,
}

/// Runs the scenario; all its calls, in the order of their ends.
pub(super) async fn run(flags: &AgentFlags, target: &Target) -> Vec<Call> {
    let total = match flags.scenario {
        Scenario::Mixed => u64::from(flags.users) * u64::from(flags.programs * flags.turns),
        Scenario::Nat => u64::from(flags.programs) * u64::from(NAT_WIDTH + 3),
    };
    let run = Arc::new(Run {
        flags: flags.clone(),
        target: target.clone(),
        begin: crate::clock::now(),
        calls: Mutex::default(),
        bar: bar(total),
        over: AtomicBool::new(false),
    });
    match flags.scenario {
        Scenario::Mixed => mixed(&run).await,
        Scenario::Nat => nat(&run).await,
    }
    run.bar.finish_and_clear();
    let mut calls = run.calls.lock().unwrap_or_else(PoisonError::into_inner);
    std::mem::take(&mut *calls)
}

fn bar(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    let template = "{msg} [{bar:40}] {pos} of {len} calls, {elapsed} ({eta} left)";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.with_message("agents")
}

async fn mixed(run: &Arc<Run>) {
    let (mut users, mut others) = (JoinSet::new(), JoinSet::new());
    for user in 0..run.flags.users {
        let run = Arc::clone(run);
        users.spawn(async move {
            for program in 0..run.flags.programs {
                run.user(user * run.flags.programs + program).await;
            }
        });
    }
    for program in 0..run.flags.background {
        let run = Arc::clone(run);
        others.spawn(async move {
            let mut round = 0;
            while !run.over.load(Ordering::Acquire) {
                run.background(program, round).await;
                round += 1;
            }
        });
    }
    while users.join_next().await.is_some() {}
    run.over.store(true, Ordering::Release);
    // What is under way would measure an emptying server.
    others.shutdown().await;
}

async fn nat(run: &Arc<Run>) {
    let seats = Arc::new(Semaphore::new(run.flags.concurrency as usize));
    let mut programs = JoinSet::new();
    for program in 0..run.flags.programs {
        let (run, seats) = (Arc::clone(run), Arc::clone(&seats));
        programs.spawn(async move {
            if let Ok(_seat) = seats.acquire().await {
                run.graph(program).await;
            }
        });
    }
    while programs.join_next().await.is_some() {}
}

impl Run {
    async fn user(self: &Arc<Run>, program: u32) {
        let flags = &self.flags;
        let mut draws = Draws::new(flags.seed, u64::from(program));
        let mut talk = Talk::new(flags, format!("user-{}-{program}", flags.seed));
        // Not all at once.
        pause(draws.around(flags.think_s.min(1.0))).await;
        for turn in 0..flags.turns {
            if turn > 0 {
                pause(draws.around(flags.think_s)).await;
            }
            talk.say(&draws.words(flags.user_words));
            let manner = Manner {
                output_tokens: flags.output_tokens,
                importance: HIGH,
                speculative: flags.speculative_prefill,
            };
            let answer = self.call("user", (program, turn), &talk, manner).await;
            self.bar.inc(1);
            let Some(answer) = answer else { return };
            talk.answered(&answer);
        }
    }

    async fn background(self: &Arc<Run>, program: u32, round: u32) {
        let flags = &self.flags;
        let number = 1_000_000 + u64::from(round) * 10_000 + u64::from(program);
        let mut draws = Draws::new(flags.seed, number);
        let mut talk = Talk::new(flags, format!("background-{}-{number}", flags.seed));
        for turn in 0..flags.turns {
            pause(draws.around(flags.tool_s)).await;
            talk.say(&draws.words(flags.tool_words));
            let manner = Manner {
                output_tokens: flags.background_output_tokens,
                importance: LOW,
                speculative: false,
            };
            let answer = self
                .call("background", (program, turn), &talk, manner)
                .await;
            let Some(answer) = answer else { return };
            talk.answered(&answer);
            if self.over.load(Ordering::Acquire) {
                return;
            }
        }
    }

    /// One call, four side by side, one that joins them, a last one.
    async fn graph(self: &Arc<Run>, program: u32) {
        let flags = &self.flags;
        let mut draws = Draws::new(flags.seed, u64::from(program));
        let session = |node: &str| format!("nat-{}-{program}-{node}", flags.seed);
        let manner = |stage: usize, importance| Manner {
            output_tokens: NAT_OUTPUT[stage],
            importance,
            speculative: false,
        };
        let mut talk = Talk::new(flags, session("triage"));
        talk.say(&draws.words(flags.user_words));
        let (first, high) = ((program, 0), manner(0, HIGH));
        let Some(found) = self.call("first (high)", first, &talk, high).await else {
            return self.bar.inc(u64::from(NAT_WIDTH + 3));
        };
        self.bar.inc(1);
        let mut branches = JoinSet::new();
        for branch in 0..NAT_WIDTH {
            let mut talk = Talk::new(flags, session(&format!("branch-{branch}")));
            talk.say(&format!("{found} {}", draws.words(flags.tool_words)));
            let (run, low) = (Arc::clone(self), manner(1, LOW));
            branches.spawn(async move {
                let answer = run.call("branch (low)", (program, 1), &talk, low).await;
                run.bar.inc(1);
                answer.unwrap_or_default()
            });
        }
        let mut joined = String::new();
        while let Some(answer) = branches.join_next().await {
            joined.push_str(&answer.unwrap_or_default());
            joined.push('\n');
        }
        let mut talk = Talk::new(flags, session("join"));
        talk.say(&joined);
        let medium = manner(2, MEDIUM);
        let summary = self
            .call("join (medium)", (program, 2), &talk, medium)
            .await;
        self.bar.inc(1);
        talk.answered(&summary.unwrap_or_default());
        talk.say(&draws.words(flags.user_words));
        let last = manner(3, HIGH);
        self.call("last (high)", (program, 3), &talk, last).await;
        self.bar.inc(1);
    }

    /// Makes a call and notes what came of it.
    async fn call(
        &self,
        class: &str,
        (program, turn): (u32, u32),
        talk: &Talk,
        manner: Manner,
    ) -> Option<String> {
        let body = talk.body(&self.flags, manner);
        let start_s = crate::clock::now().duration_since(self.begin).as_secs_f64();
        let answer = self.target.ask(&body).await;
        let mut call = Call {
            class: class.to_owned(),
            program,
            turn,
            start_s,
            ..Call::default()
        };
        let text = match answer {
            Ok(reply) => {
                call.ttft_s = reply.ttft_s;
                call.total_s = reply.total_s;
                call.prompt_tokens = reply.prompt_tokens;
                call.cached_tokens = reply.cached_tokens;
                call.output_tokens = reply.output_tokens;
                Some(reply.text)
            }
            Err(error) => {
                call.error = Some(error);
                // A server that refuses is not asked again at once.
                pause(1.0).await;
                None
            }
        };
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.push(call);
        text
    }
}

async fn pause(seconds: f64) {
    tokio::time::sleep(Duration::from_secs_f64(seconds.max(0.0))).await;
}
