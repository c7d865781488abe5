//! Hints that nobody gave: what the requests of agent programs tell by themselves.
//!
//! | what is seen | what follows |
//! |---|---|
//! | an answer calls one tool that starts agents twice or more | its first child's head is pinned |
//! | an answer of a child ends in text | its parent comes back: what it needs is brought up |
//! | a parent asks again, and a child has ended in text | what that child alone used goes first |
//! | an answer ends in calls | the session comes back soon: it is retained for a while |
//! | an answer ends in text, and earlier ones were followed up soon | the same, as long as usual |
//! | no tools, and an answer of a schema: a title, a note | a side request: priority -1 |
//! | the name of a small model, and a larger one is loaded | priority -1 |
//!
//! A hint that the caller gave always counts instead. Bounded: what was heard of longest ago is
//! forgotten, which costs nothing but the hint.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rootstock::hints::ParsedHints;
use rootstock::radix::{Action, Target, Ttl};
use rootstock_engine::service::Service;

use crate::control::actions;
use crate::engine_port::{Engine, TENANT, scoped};

/// Sessions that are known at a time.
const SESSIONS_MAX: usize = 4096;
/// Children of one session.
const CHILDREN_MAX: usize = 64;
/// How long the head of children is kept for their siblings.
const SIBLINGS_S: u64 = 120;
/// How long a session is retained that waits for the results of its calls.
const TOOL_GAP_S: u64 = 60;
/// How long a session is retained, at least and at most, that waits for its user. Whoever usually
/// needs more time than that is not waited for.
const HUMAN_GAP_S: std::ops::RangeInclusive<u64> = 10..=600;
/// Below everything that was said nothing about.
const LOW: i32 = -1;
/// Words in the names of small models.
const SMALL: [&str; 6] = ["haiku", "nano", "mini", "small", "lite", "flash"];

/// What was derived for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Children will follow with the same head.
    FanOut,
    /// Who waits for this answer comes back.
    ParentDue,
    /// A child has ended.
    ChildEnded,
    /// The next request is soon.
    ToolGap,
    /// The next request is due when the user has usually read the answer.
    HumanGap,
    /// Not what somebody waits for.
    SideRequest,
    /// A small model was asked for.
    SmallModel,
}

impl Kind {
    /// Its name in `nvext` and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Kind::FanOut => "fan_out",
            Kind::ParentDue => "parent_due",
            Kind::ChildEnded => "child_ended",
            Kind::ToolGap => "tool_gap",
            Kind::HumanGap => "human_gap",
            Kind::SideRequest => "side_request",
            Kind::SmallModel => "small_model",
        }
    }
}

/// What is seen of a request before it runs.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// The model asked for.
    pub model: Option<&'a str>,
    /// The model that is loaded.
    pub loaded: &'a str,
    /// Whether there are tools to call.
    pub has_tools: bool,
    /// Whether the answer is bound to a schema.
    pub has_schema: bool,
    /// Tokens of instructions and tools at the head of the prompt.
    pub head_tokens: u32,
    /// When it came.
    pub now: Instant,
}

/// The sessions that are known.
#[derive(Debug, Default)]
pub struct Agents {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    sessions: BTreeMap<String, Session>,
    by_use: BTreeMap<u64, String>,
    uses: u64,
}

#[derive(Debug, Default)]
struct Session {
    used: u64,
    running: u32,
    /// Its last answer ended in text: whoever started it has what was wanted.
    has_answered: bool,
    /// When that was, until its user speaks again.
    answered: Option<Instant>,
    /// How long the user has usually taken.
    human_gap: Option<Duration>,
    children: Vec<String>,
    /// Children that are announced and have not come.
    expected: u32,
}

/// A request of a session that is under way.
#[derive(Debug)]
pub struct AgentTurn {
    agents: Arc<Agents>,
    session: String,
    /// Who started it, by the name that the client gives it.
    parent: Option<String>,
    salt: Option<String>,
    engine: Arc<Engine>,
    calls: Option<Vec<String>>,
}

impl Agents {
    /// A request has come: adds to its hints what follows from what is known, and tells what that
    /// was. Sessions that have ended with it are released.
    pub fn arrive(
        self: &Arc<Agents>,
        parsed: &mut ParsedHints,
        seen: Seen<'_>,
        engine: &Arc<Engine>,
    ) -> (Vec<Kind>, Option<AgentTurn>) {
        let mut kinds = lower(parsed, seen);
        let own = |name: &String| scoped(parsed.salt.as_deref(), name);
        let Some(session) = parsed.hints.program.as_ref().map(own) else {
            return (kinds, None);
        };
        let parent = parsed.hints.parent.as_ref().map(own);
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = inner.ended_children(&session);
        let known = inner.session(&session);
        known.running += 1;
        if seen.has_tools || !seen.has_schema {
            known.hear_user(seen.now);
        }
        let is_first = parent.is_some_and(|parent| inner.is_first_child(&parent, &session));
        drop(inner);
        if is_first && seen.head_tokens > 0 {
            let ttl = Ttl {
                seconds: SIBLINGS_S,
                clamped: false,
            };
            parsed.pin([(seen.head_tokens, ttl)]);
            kinds.push(Kind::FanOut);
        }
        if !ended.is_empty() {
            kinds.push(Kind::ChildEnded);
            act(engine.service(), ended, |target| Action::Release { target });
        }
        let turn = AgentTurn {
            agents: Arc::clone(self),
            session,
            parent: parsed.hints.parent.clone(),
            salt: parsed.salt.clone(),
            engine: Arc::clone(engine),
            calls: None,
        };
        (kinds, Some(turn))
    }

    fn human_gap_s(&self, session: &str) -> Option<u64> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.sessions.get(session)?.human_gap_s()
    }

    fn leave(&self, session: &str, calls: Option<&[String]>) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(known) = inner.sessions.get_mut(session) else {
            return;
        };
        known.running = known.running.saturating_sub(1);
        if let Some(calls) = calls {
            known.has_answered = calls.is_empty();
            known.answered = calls.is_empty().then(crate::clock::now);
            known.expected = spawned(calls);
        }
    }
}

impl Session {
    /// Its user speaks: the time since the last answer counts a quarter of what is usual.
    fn hear_user(&mut self, now: Instant) {
        let Some(answered) = self.answered.take() else {
            return;
        };
        let gap = now.saturating_duration_since(answered);
        let usual = self.human_gap.map_or(gap, |usual| (usual * 3 + gap) / 4);
        self.human_gap = Some(usual);
    }

    /// For how long to wait for its user: twice the usual time.
    fn human_gap_s(&self) -> Option<u64> {
        let seconds = self.human_gap?.as_secs().saturating_mul(2);
        let (least, most) = (*HUMAN_GAP_S.start(), *HUMAN_GAP_S.end());
        (seconds <= most).then(|| seconds.max(least))
    }
}

impl AgentTurn {
    /// Its answer has ended with calls of these tools; tells what follows from that.
    pub fn end(&mut self, calls: Vec<String>) -> Option<Kind> {
        let waits = !calls.is_empty();
        self.calls = Some(calls);
        let kept = match (waits, &self.parent) {
            (true, _) => Some((Kind::ToolGap, TOOL_GAP_S)),
            // Its parent goes on, and nobody speaks to it.
            (false, Some(_)) => None,
            (false, None) => {
                let gap = self.agents.human_gap_s(&self.session);
                gap.map(|seconds| (Kind::HumanGap, seconds))
            }
        };
        if let Some((kind, seconds)) = kept {
            let sessions = vec![self.session.clone()];
            act(self.engine.service(), sessions, move |target| {
                Action::Retain {
                    target,
                    priority: 1,
                    seconds: Some(seconds),
                }
            });
            return Some(kind);
        }
        let parent = self.parent.clone()?;
        let (engine, salt) = (Arc::clone(&self.engine), self.salt.clone());
        let up = async move { actions::expect_session(&engine, &parent, salt.as_deref()).await };
        // Without a runtime (tests of this file) there is no engine either.
        tokio::runtime::Handle::try_current().ok()?.spawn(up);
        Some(Kind::ParentDue)
    }
}

impl Drop for AgentTurn {
    fn drop(&mut self) {
        self.agents.leave(&self.session, self.calls.as_deref());
    }
}

impl Inner {
    /// The session, new or known; it is the one that was heard of last.
    fn session(&mut self, name: &str) -> &mut Session {
        self.uses += 1;
        let uses = self.uses;
        let known = self.sessions.entry(name.to_owned()).or_default();
        self.by_use.remove(&known.used);
        known.used = uses;
        self.by_use.insert(uses, name.to_owned());
        if self.sessions.len() > SESSIONS_MAX
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            self.sessions.remove(&oldest);
        }
        self.sessions.entry(name.to_owned()).or_default()
    }

    /// Children of a session that asks again, which have answered and are silent; each once.
    fn ended_children(&mut self, name: &str) -> Vec<String> {
        let Some(known) = self.sessions.get_mut(name) else {
            return Vec::new();
        };
        let children = std::mem::take(&mut known.children);
        let has_ended = |child: &String| {
            let child = self.sessions.get(child);
            child.is_none_or(|child| child.running == 0 && child.has_answered)
        };
        let (ended, others) = children.into_iter().partition(has_ended);
        self.session(name).children = others;
        ended
    }

    /// Notes a child; true for the first of several that were announced.
    fn is_first_child(&mut self, parent: &str, child: &str) -> bool {
        let known = self.session(parent);
        let is_new = !known.children.iter().any(|other| other == child);
        if is_new && known.children.len() < CHILDREN_MAX {
            known.children.push(child.to_owned());
        }
        is_new && std::mem::take(&mut known.expected) > 1
    }
}

/// Lowers what nobody waits for, unless the caller said how important it is.
fn lower(parsed: &mut ParsedHints, seen: Seen<'_>) -> Vec<Kind> {
    let mut kinds = Vec::new();
    if !seen.has_tools && seen.has_schema {
        kinds.push(Kind::SideRequest);
    }
    if seen
        .model
        .is_some_and(|model| is_smaller(model, seen.loaded))
    {
        kinds.push(Kind::SmallModel);
    }
    let hints = &mut parsed.hints;
    let said = hints.priority != 0 || hints.strict != 0 || hints.jump_s > 0.0;
    if said || kinds.is_empty() {
        return Vec::new();
    }
    hints.priority = LOW;
    kinds
}

/// True when a name is that of a small model, and the one that is loaded is not of that size.
fn is_smaller(asked: &str, loaded: &str) -> bool {
    let words = |name: &str| -> Vec<String> {
        let words = name.split(|c: char| !c.is_ascii_alphanumeric());
        words.map(str::to_ascii_lowercase).collect()
    };
    let (asked, loaded) = (words(asked), words(loaded));
    let is_in = |words: &[String], small: &str| words.iter().any(|word| word == small);
    SMALL
        .iter()
        .any(|small| is_in(&asked, small) && !is_in(&loaded, small))
}

/// Calls of one tool that starts agents, when there are several.
fn spawned(calls: &[String]) -> u32 {
    let starts_agents = |name: &&String| {
        let name = name.to_ascii_lowercase();
        name.contains("agent") || name == "task" || name == "delegate"
    };
    let Some(name) = calls.iter().find(starts_agents) else {
        return 0;
    };
    let count = calls.iter().filter(|call| *call == name).count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Carries out a verb on sessions, between two steps of the engine; nobody waits for it.
fn act(service: &Service, sessions: Vec<String>, verb: impl Fn(Target) -> Action + Send + 'static) {
    let service = service.clone();
    let visit = move |at: rootstock_engine::service::Visit<'_>| {
        for session in &sessions {
            let cache = at.core.cache();
            let programs: Vec<_> = cache.programs_named(TENANT, session).collect();
            for program in programs {
                let _what_is_gone_needs_nothing =
                    at.core.act(TENANT, &verb(Target::Program(program)), at.now);
            }
        }
    };
    // Without a runtime (tests of this file) there is no engine either.
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn(async move { service.visit(visit).await });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A title, or with tools what somebody waits for.
    fn seen(model: &str, has_tools: bool) -> Seen<'_> {
        Seen {
            model: Some(model),
            loaded: "smollm2-135m",
            has_tools,
            has_schema: true,
            head_tokens: 100,
            now: crate::clock::now(),
        }
    }

    #[test]
    fn the_usual_time_of_a_user_is_waited_for_twice_unless_it_is_long() {
        let mut session = Session::default();
        let mut now = crate::clock::now();
        assert_eq!(session.human_gap_s(), None, "nothing is known yet");
        for (gap_s, waits_s) in [(40, Some(80)), (80, Some(100)), (0, Some(74)), (2000, None)] {
            session.answered = Some(now);
            now += Duration::from_secs(gap_s);
            session.hear_user(now);
            session.hear_user(now + Duration::from_secs(999));
            assert_eq!(session.human_gap_s(), waits_s, "after {gap_s} s");
        }
        let mut quick = Session {
            answered: Some(now),
            ..Session::default()
        };
        quick.hear_user(now);
        assert_eq!(quick.human_gap_s(), Some(10));
    }

    #[test]
    fn small_models_are_told_by_words_of_their_names() {
        for name in ["claude-haiku-4-5-20251001", "gpt-5.4-nano", "GPT-4o-MINI"] {
            assert!(is_smaller(name, "smollm2-135m"), "{name}");
        }
        for name in ["gemini-pro", "nanotechnology", "smollm2-135m", ""] {
            assert!(!is_smaller(name, "smollm2-135m"), "{name}");
        }
        assert!(
            !is_smaller("phi-mini", "phi-3-mini"),
            "it is what is loaded"
        );
    }

    #[test]
    fn what_the_caller_says_counts_instead() {
        let mut parsed = ParsedHints::default();
        let kinds = lower(&mut parsed, seen("a-nano", false));
        assert_eq!(kinds, [Kind::SideRequest, Kind::SmallModel]);
        assert_eq!(parsed.hints.priority, LOW);
        let mut parsed = ParsedHints::default();
        parsed.hints.priority = 3;
        assert_eq!(lower(&mut parsed, seen("a-nano", false)), []);
        assert_eq!(parsed.hints.priority, 3);
        let mut parsed = ParsedHints::default();
        assert_eq!(lower(&mut parsed, seen("big", true)), []);
        assert_eq!(parsed.hints.priority, 0);
    }

    #[test]
    fn the_first_of_several_children_is_told_and_ended_ones_once() {
        let mut inner = Inner::default();
        inner.session("p").expected = spawned(&["Task".into(), "Task".into(), "Read".into()]);
        assert!(inner.is_first_child("p", "a"));
        assert!(
            !inner.is_first_child("p", "b"),
            "the second finds it pinned"
        );
        inner.session("a").has_answered = true;
        inner.session("b").running = 1;
        assert_eq!(inner.ended_children("p"), ["a"]);
        inner.session("b").running = 0;
        assert_eq!(
            inner.ended_children("p"),
            [""; 0],
            "it has not answered yet"
        );
        inner.session("b").has_answered = true;
        assert_eq!(inner.ended_children("p"), ["b"]);
        assert_eq!(inner.ended_children("p"), [""; 0]);
        assert_eq!(spawned(&["Task".into()]), 1);
        assert_eq!(spawned(&["Read".into(), "Read".into()]), 0);
    }

    #[test]
    fn sessions_are_bounded() {
        let mut inner = Inner::default();
        for number in 0..SESSIONS_MAX + 10 {
            inner.session(&number.to_string()).running = 1;
        }
        assert_eq!(inner.sessions.len(), SESSIONS_MAX);
        assert_eq!(inner.by_use.len(), SESSIONS_MAX);
        assert!(!inner.sessions.contains_key("0"));
    }
}
