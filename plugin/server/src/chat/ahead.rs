//! Speculative prefill: after a turn with `agent_hints.speculative_prefill`, what the next turn's
//! prompt will begin with is computed ahead, while the user reads or the tool runs. So it is,
//! unless hints are not derived, after a turn with a call in a spacing that no client sends back:
//! in the conversation it stands in the template's.
//!
//! ```text
//! a turn ends -> its answer as a message -> two made-up next turns, rendered and encoded
//!             -> what both begin with, in whole pages, if more than a page of it is not cached
//!             -> a speculative request for it, of one token, below all client work
//! the real turn comes, a client waits, or a minute passes -> it ends
//! ```
//! The prompt is rendered exactly as that of a real turn: tools, template arguments, salt, and
//! whatever the template strips of thoughts. What differs between the two made-up turns is what
//! the user or the tool will say; nothing of it is computed.
//!
//! It is no client request: not billed, not counted as one, no answer is kept. At most
//! [`PREPARING_MAX`] are prepared at a time and [`KEPT_MAX`] remembered; beyond, a turn goes
//! without.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rootstock::memory::ReplicaId;
use rootstock::radix::{Hints, Key, NamespaceKey, Token};
use rootstock::scheduler::{CachedTokens, Class};
use rootstock_engine::service::{Submission, Ticket, Visit};
use serde_json::{Value, json};

use crate::chat::conversation::Conversation;
use crate::chat::message::Draft;
use crate::engine_port::{Engine, Event, Job, Prompt, TENANT};
use crate::tools::prompt::spaced_json;
use crate::tools::speech::{Said, Speech};

/// Turns whose next prompt is being rendered, at most.
pub const PREPARING_MAX: usize = 4;
/// Warmed prompts that are remembered until their turn comes, at most.
pub const KEPT_MAX: usize = 256;
/// How long a warmed prompt is remembered, and how long its computation may take.
const LIFETIME: Duration = Duration::from_secs(60);
/// Two things that may be said next. No token can reach from what stands before into both.
const SAYINGS: [&str; 2] = ["Yes", "\n 7"];

/// What a finished turn leaves for the next one.
#[derive(Clone, Debug)]
pub struct NextTurn {
    /// The conversation without the answer.
    pub talk: Conversation,
    /// How the answer was asked for: its rules, stops, salt and hints.
    pub job: Job,
    /// Whether the client sends thoughts back.
    pub thoughts_come_back: bool,
    /// Only when the answer has a call that comes back in another spacing.
    pub only_odd: bool,
}

/// Counts of speculative prefill. All only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AheadStats {
    /// Requests made.
    pub started: u64,
    /// Turns whose next prompt was cached already, but for a page at most.
    pub cached_already: u64,
    /// Turns that went without: too many at a time, the same one under way, clients waiting.
    pub skipped: u64,
    /// Requests ended before their time, by the real turn or by client work.
    pub cancelled: u64,
    /// Tokens computed ahead.
    pub warmed_tokens: u64,
    /// Of those, found by the turn they were for.
    pub used_tokens: u64,
    /// Of those, never found.
    pub wasted_tokens: u64,
}

/// The prompts computed ahead.
#[derive(Debug, Default)]
pub struct Ahead {
    preparing: AtomicUsize,
    kept: Mutex<Vec<Kept>>,
    next_id: AtomicU64,
    started: AtomicU64,
    cached_already: AtomicU64,
    skipped: AtomicU64,
    cancelled: AtomicU64,
    warmed: AtomicU64,
    used: AtomicU64,
    wasted: AtomicU64,
}

#[derive(Debug)]
struct Kept {
    id: u64,
    salt: Option<String>,
    tokens: Arc<[Token]>,
    /// Tokens of the conversation up to the answer: whoever shares them goes on from it.
    base: usize,
    /// Cached before.
    from: u32,
    /// Computed; known at the end.
    warmed: u32,
    /// None once it has ended.
    ticket: Option<Ticket>,
}

/// A real turn's claim on what was computed for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    from: u32,
    to: u32,
    warmed: u32,
}

impl Ahead {
    /// The counts so far.
    pub fn stats(&self) -> AheadStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        AheadStats {
            started: get(&self.started),
            cached_already: get(&self.cached_already),
            skipped: get(&self.skipped),
            cancelled: get(&self.cancelled),
            warmed_tokens: get(&self.warmed),
            used_tokens: get(&self.used),
            wasted_tokens: get(&self.wasted),
        }
    }

    /// Begins to compute what the turn after this one will begin with, in the background. `ids`
    /// are the answer's tokens. Does nothing outside of a runtime.
    pub fn begin(engine: &Arc<Engine>, next: &Arc<NextTurn>, ids: &[Token]) {
        let wish = Wish {
            salt: next.job.salt.clone(),
            priority: next.job.hints.priority,
            retention_s: next.job.hints.retention_s,
        };
        let (next, ids) = (Arc::clone(next), ids.to_vec());
        Self::prepare(engine, wish, move |engine| {
            stable_prefix(engine, &next, &ids)
        });
    }

    /// Begins to compute what every prompt begins with that goes on from `talk`: the system prompt
    /// and tools of a program that is about to start. False: too many are being prepared.
    pub fn begin_with(engine: &Arc<Engine>, talk: Conversation, salt: Option<String>) -> bool {
        let wish = Wish {
            salt: salt.clone(),
            priority: 0,
            retention_s: None,
        };
        Self::prepare(engine, wish, move |engine| {
            let prompt = common_start(engine, &talk, &[], salt.as_deref())?;
            let base = prompt.tokens.len();
            Some(Prepared { prompt, base })
        })
    }

    fn prepare(
        engine: &Arc<Engine>,
        wish: Wish,
        prompt: impl FnOnce(&Engine) -> Option<Prepared> + Send + 'static,
    ) -> bool {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return false;
        };
        let ahead = engine.ahead();
        if ahead.preparing.fetch_add(1, Ordering::AcqRel) >= PREPARING_MAX {
            ahead.preparing.fetch_sub(1, Ordering::AcqRel);
            ahead.skipped.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let engine = Arc::clone(engine);
        runtime.spawn(async move {
            let prepare = {
                let engine = Arc::clone(&engine);
                tokio::task::spawn_blocking(move || prompt(&engine))
            };
            let prepared = prepare.await.ok().flatten();
            engine.ahead().preparing.fetch_sub(1, Ordering::AcqRel);
            if let Some(prepared) = prepared {
                run(&engine, wish, prepared).await;
            }
        });
        true
    }

    /// A client's request comes: what was computed ahead for it is computed no further, and
    /// remembered no longer.
    pub fn arrived(&self, salt: Option<&str>, tokens: &[Token]) -> Option<Claim> {
        let mut kept = self.lock();
        let at = kept.iter().position(|one| {
            let common = shared(&one.tokens, tokens);
            one.salt.as_deref() == salt && common > 0 && common >= one.base
        })?;
        // Dropping its ticket ends what is still under way.
        let one = kept.swap_remove(at);
        drop(kept);
        let to = u32::try_from(shared(&one.tokens, tokens)).unwrap_or(u32::MAX);
        Some(Claim {
            from: one.from,
            to,
            warmed: one.warmed,
        })
    }

    /// The request of a claim has started, with so much of its prompt cached.
    pub fn used(&self, claim: Claim, cached: CachedTokens) {
        let used = cached.total().min(claim.to).saturating_sub(claim.from);
        let used = used.min(claim.warmed);
        self.used.fetch_add(used.into(), Ordering::Relaxed);
        let wasted = u64::from(claim.warmed - used);
        self.wasted.fetch_add(wasted, Ordering::Relaxed);
    }

    /// Remembers a request; false when the same is remembered already, or too many are.
    fn keep(&self, one: Kept) -> bool {
        let mut kept = self.lock();
        let known = |other: &Kept| other.salt == one.salt && other.tokens == one.tokens;
        let room = kept.len() < KEPT_MAX && !kept.iter().any(known);
        if room {
            kept.push(one);
        }
        room
    }

    /// A request has ended, having computed so much. False when its turn came before.
    fn ended(&self, id: u64, warmed: u32) {
        self.warmed.fetch_add(warmed.into(), Ordering::Relaxed);
        let mut kept = self.lock();
        match kept.iter_mut().find(|one| one.id == id) {
            Some(one) => {
                one.warmed = warmed;
                one.ticket = None;
            }
            None => {
                drop(kept);
                self.wasted.fetch_add(warmed.into(), Ordering::Relaxed);
            }
        }
    }

    fn forget(&self, id: u64) {
        let mut kept = self.lock();
        if let Some(at) = kept.iter().position(|one| one.id == id) {
            let one = kept.swap_remove(at);
            drop(kept);
            self.wasted.fetch_add(one.warmed.into(), Ordering::Relaxed);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For whom something is computed ahead, and what it is worth.
#[derive(Debug)]
struct Wish {
    salt: Option<String>,
    priority: i32,
    retention_s: Option<u32>,
}

/// A prompt to compute ahead.
#[derive(Debug)]
struct Prepared {
    prompt: Prompt,
    /// Tokens of the conversation before the answer.
    base: usize,
}

/// What the prompt of the next turn begins with, whatever is said in it. None when that cannot be
/// rendered, or is less than a page.
fn stable_prefix(engine: &Engine, next: &NextTurn, ids: &[Token]) -> Option<Prepared> {
    let talk = answered(engine, next, ids);
    let calls = talk
        .messages
        .last()
        .and_then(|message| message["tool_calls"].as_array())
        .map_or_else(Vec::new, Clone::clone);
    if next.only_odd && !is_odd(&calls, &engine.text_of(ids)) {
        return None;
    }
    let prompt = common_start(engine, &talk, &calls, next.job.salt.as_deref())?;
    // The head of the answer is often not what stands before the answer that came back.
    let base = shared(&prompt.tokens, &next.job.tokens);
    Some(Prepared { prompt, base })
}

/// What all prompts begin with that go on from `talk`: with results of the calls that it ends
/// with, else with something a user says. Whole pages; None when it is less than one.
fn common_start(
    engine: &Engine,
    talk: &Conversation,
    calls: &[Value],
    salt: Option<&str>,
) -> Option<Prompt> {
    let prompt_of = |saying: &str| {
        let mut talk = talk.clone();
        match calls {
            [] => talk
                .messages
                .push(json!({"role": "user", "content": saying})),
            calls => talk.messages.extend(calls.iter().map(
                |call| json!({"role": "tool", "content": saying, "tool_call_id": call["id"]}),
            )),
        }
        talk.canonical_ids();
        engine.chat_prompt(&talk, salt).ok()
    };
    let [one, other] = SAYINGS.map(prompt_of);
    let (mut prompt, other) = (one?, other?);
    let page = engine.service().model_info().page_tokens as usize;
    let stable = shared(&prompt.tokens, &other.tokens);
    let whole = stable - stable % page.max(1);
    prompt.tokens.truncate(whole);
    let end = prompt.len();
    prompt.spans.retain(|(range, _)| range.start < end);
    for (range, _) in &mut prompt.spans {
        range.end = range.end.min(end);
    }
    (whole > 0).then_some(prompt)
}

/// Whether the arguments of a call stand in the answer otherwise than templates print them.
fn is_odd(calls: &[Value], said: &str) -> bool {
    let printed = |call: &Value| spaced_json(&call["function"]["arguments"]);
    calls.iter().any(|call| !said.contains(&printed(call)))
}

/// The conversation with the answer, as the client will send it back.
fn answered(engine: &Engine, next: &NextTurn, ids: &[Token]) -> Conversation {
    let mut talk = next.talk.clone();
    talk.marks.clear();
    let mut text = engine.text_stream(&next.job);
    let mut speech = Speech::new(next.job.rules.clone());
    let mut said = Vec::new();
    for &id in ids {
        let piece = text.push(id);
        speech.push(&piece.text, &mut said);
        if piece.is_end || piece.stop.is_some() {
            break;
        }
    }
    speech.push(&text.finish(), &mut said);
    speech.finish(true, &mut said);
    let mut content = talk.prefill.take().unwrap_or_default();
    let (mut thoughts, mut calls) = (String::new(), Vec::new());
    for one in said {
        match one {
            Said::Text(text) => content.push_str(&text),
            Said::Thought(thought) => thoughts.push_str(&thought),
            Said::Call(call) => calls.push(call),
        }
    }
    let mut message = Draft::new("assistant");
    message.say(&content);
    if next.thoughts_come_back {
        message.think(&thoughts);
    }
    for (index, call) in calls.into_iter().enumerate() {
        message.call(
            &format!("ahead{index}"),
            &call.name,
            Value::Object(call.arguments),
        );
    }
    talk.messages.push(message.take());
    talk
}

/// Computes a prompt ahead and follows it to its end.
async fn run(engine: &Arc<Engine>, wish: Wish, prepared: Prepared) {
    let Prepared { prompt, base } = prepared;
    let ahead = engine.ahead();
    let tokens: Arc<[Token]> = prompt.tokens.into();
    let salt = wish.salt;
    let Some(look) = look(engine, salt.clone(), Arc::clone(&tokens)).await else {
        return;
    };
    // The page in which an answer ends is never whole before the next turn: alone it is not worth
    // a request.
    let page_tokens = engine.service().model_info().page_tokens as usize;
    if look.cached as usize + page_tokens >= tokens.len() {
        ahead.cached_already.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let submission = Submission {
        hints: Hints {
            priority: wish.priority,
            retention_s: wish.retention_s,
            spans: prompt.spans,
            ..Hints::default()
        },
        salt: salt.clone(),
        tenant: TENANT,
        class: Class::Speculative,
        patience: Some(LIFETIME),
        ..Submission::new(tokens.to_vec(), 1)
    };
    let ticket = match look.clients_wait {
        true => None,
        false => engine.service().submit_async(submission).await.ok(),
    };
    let Some(ticket) = ticket else {
        ahead.skipped.fetch_add(1, Ordering::Relaxed);
        return;
    };
    let events = ticket.events.clone();
    let id = ahead.next_id.fetch_add(1, Ordering::Relaxed);
    let kept = Kept {
        id,
        salt: salt.clone(),
        tokens: Arc::clone(&tokens),
        base,
        from: look.cached,
        warmed: 0,
        ticket: Some(ticket),
    };
    // Dropping the ticket ends the request.
    if !ahead.keep(kept) {
        ahead.skipped.fetch_add(1, Ordering::Relaxed);
        return;
    }
    ahead.started.fetch_add(1, Ordering::Relaxed);
    let mut whole = false;
    while let Ok(event) = events.recv_async().await {
        if let Event::Final { reason, .. } = event {
            whole = reason == rootstock::scheduler::FinishReason::Length;
            break;
        }
    }
    if !whole {
        ahead.cancelled.fetch_add(1, Ordering::Relaxed);
    }
    let now = self::look(engine, salt, tokens).await;
    let cached = now.map_or(0, |now| now.cached);
    ahead.ended(id, cached.saturating_sub(look.cached));
    tokio::time::sleep(LIFETIME).await;
    ahead.forget(id);
}

/// What is cached of a prompt on the replica that has most of it, and whether a client waits.
#[derive(Clone, Copy, Debug)]
struct Look {
    cached: u32,
    clients_wait: bool,
}

async fn look(engine: &Engine, salt: Option<String>, tokens: Arc<[Token]>) -> Option<Look> {
    let visit = move |at: Visit<'_>| {
        let name = NamespaceKey {
            salt,
            ..at.namespace.clone()
        };
        let key = Key {
            ns: at.core.namespace(&name).ok()?,
            tokens: &tokens,
        };
        let replicas = u16::try_from(at.core.config().replicas()).unwrap_or(u16::MAX);
        let found = (0..replicas).map(|replica| {
            let probe = at.core.probe(key, ReplicaId(replica));
            probe.device_tokens
        });
        let stats = at.core.stats();
        Some(Look {
            cached: found.max().unwrap_or(0),
            clients_wait: stats.schedulers.iter().any(|one| one.waiting > 0),
        })
    };
    engine.service().visit(visit).await.ok().flatten()
}

/// Leading tokens that two prompts have in common.
fn shared(one: &[Token], other: &[Token]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}
