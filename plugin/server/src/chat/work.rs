//! From a request that was read in full to its answers in the engine: the same for all APIs.

use std::sync::Arc;

use rootstock::hints::{self, ParsedHints};
use rootstock::radix::{ContextKind, Retention};
use serde_json::Value;

use axum::http::HeaderMap;

use crate::app::App;
use crate::chat::ahead::NextTurn;
use crate::chat::conversation::{Conversation, Format};
use crate::chat::derived::{AgentTurn, Kind, Seen};
use crate::control::in_request;
use crate::control::why::Finding;
use crate::engine_port::{Engine, Grammar, Job, Prompt};
use crate::http::api_error::{ApiError, ErrorKind};
use crate::http::lifecycle::LiveRequest;
use crate::kind_retention::KindRetention;
use crate::openai::ask::Ask;
use crate::openai::generation::{Generation, PromptJobs};
use crate::openai::turn::Turn;
use crate::tools::speech::{Rules, Thoughts};

/// What is to be generated.
#[derive(Debug)]
pub struct Work {
    /// How many answers, how long, how drawn.
    pub ask: Ask,
    /// What the caller knows.
    pub parsed: ParsedHints,
    /// The prompts.
    pub prompts: Vec<Prompt>,
    /// How answers are read.
    pub rules: Rules,
    /// What answers have to be.
    pub grammar: Option<Grammar>,
    /// The field of the body that the prompt comes from.
    pub prompt_field: &'static str,
    /// The conversation, where the next turn's prompt is to be computed ahead.
    pub next: Option<Conversation>,
    /// What a conversation shows beside its text; none for plain prompts.
    pub shown: Option<Shown>,
    /// Hints that nobody gave; known when it has started.
    pub derived: Vec<Kind>,
}

/// What a conversation shows beside its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    has_tools: bool,
    has_schema: bool,
}

impl Work {
    /// A conversation with one prompt.
    ///
    /// # Errors
    /// When it cannot be made into tokens.
    pub fn of_talk(
        engine: &Engine,
        ask: Ask,
        mut parsed: ParsedHints,
        talk: &Conversation,
        prompt_field: &'static str,
    ) -> Result<Work, ApiError> {
        let prompt = engine
            .chat_prompt(talk, parsed.salt.as_deref())
            .map_err(|error| error.of(prompt_field))?;
        let grammar = engine.grammar(talk, prompt.is_thinking)?;
        let marks = talk.marks.iter().zip(&prompt.marks);
        let has_tools = !talk.callable().is_empty();
        let ahead = (parsed.hints.speculate || has_tools) && ask.n == 1;
        parsed.pin(marks.map(|(mark, tokens)| (*tokens, mark.ttl)));
        Ok(Work {
            rules: rules(engine, talk, &prompt),
            grammar,
            next: ahead.then(|| talk.clone()),
            ask,
            parsed,
            prompts: vec![prompt],
            prompt_field,
            shown: Some(Shown {
                has_tools,
                has_schema: matches!(talk.format, Format::Schema(_) | Format::JsonObject),
            }),
            derived: Vec::new(),
        })
    }

    /// Queues all answers.
    ///
    /// # Errors
    /// Whatever refuses the first; nothing runs then.
    pub async fn start(&mut self, app: &App, live: LiveRequest) -> Result<Generation, ApiError> {
        let agent = self.derive(app);
        let jobs = self.prompts.iter().map(|prompt| self.jobs(prompt, app));
        let jobs = jobs.collect::<Result<Vec<_>, _>>()?;
        let kv_hints = in_request::carry_out(app, &self.parsed).await;
        let generation = Generation::start(app, jobs, live, agent).await?;
        Ok(generation.answering(kv_hints))
    }

    /// Adds the hints that nobody gave.
    fn derive(&mut self, app: &App) -> Option<AgentTurn> {
        if app.agents.is_none() && !self.parsed.hints.speculate {
            self.next = None;
        }
        let (agents, shown) = (app.agents.as_ref()?, self.shown?);
        let spans = self.prompts.first().map_or(&[][..], |prompt| &prompt.spans);
        let is_head = |kind| matches!(kind, ContextKind::System | ContextKind::Tools);
        let head = spans.iter().take_while(|(_, kind)| is_head(*kind)).last();
        let seen = Seen {
            model: self.ask.model.as_deref(),
            loaded: &app.engine.card().name,
            has_tools: shown.has_tools,
            has_schema: shown.has_schema,
            head_tokens: head.map_or(0, |(tokens, _)| tokens.end),
            now: crate::clock::now(),
        };
        let (kinds, turn) = agents.arrive(&mut self.parsed, seen, &app.engine);
        kinds.iter().for_each(|kind| app.metrics.derived(*kind));
        self.derived = kinds;
        turn
    }

    /// Keeps, by the id of the answer, why not more of the first prompt was cached.
    pub fn keep_why(&self, app: &App, generation: &Generation, id: &str) -> Option<Finding> {
        let finding = generation.why()?;
        let salt = self.parsed.salt.clone();
        app.engine.memory().keep(id, salt, finding.kept());
        Some(finding)
    }

    /// Where the answers are remembered.
    pub fn turn(&self, engine: &Arc<Engine>) -> Turn {
        let n = usize::try_from(self.ask.n).unwrap_or(1);
        let places = self
            .prompts
            .iter()
            .flat_map(|prompt| std::iter::repeat_n(prompt.end, n));
        let next = self.next.as_ref().zip(self.prompts.first());
        let next = next.map(|(talk, prompt)| NextTurn {
            thoughts_come_back: talk.thoughts_come_back
                || talk
                    .messages
                    .iter()
                    .any(|message| message.get("reasoning_content").is_some()),
            talk: talk.clone(),
            only_odd: !self.parsed.hints.speculate,
            job: self.job(prompt, 1, &KindRetention::default()),
        });
        Turn::new(engine, places.collect(), next)
    }

    /// `n` jobs for one prompt. The first has the caller's seed, the others follow it.
    fn jobs(&self, prompt: &Prompt, app: &App) -> Result<PromptJobs, ApiError> {
        let (tokens, limit) = (prompt.len(), app.engine.card().max_len);
        // What does not fit is cut, not refused: many clients ask for more than any model has.
        let room = limit
            .checked_sub(tokens)
            .filter(|room| *room > 0)
            .ok_or_else(|| {
                let message = format!(
                    "prompt is too long: {tokens} tokens > {} maximum; this model's maximum \
                     context length is {limit} tokens, prompt and answer together",
                    limit.saturating_sub(1)
                );
                ApiError {
                    kind: ErrorKind::ContextLength,
                    ..ApiError::param(self.prompt_field, message)
                }
            })?;
        let room = room.min(app.max_output_tokens);
        let max_tokens = self.ask.max_tokens.unwrap_or(room).min(room);
        let job = self.job(prompt, max_tokens, &app.kind_retention);
        let jobs = (0..self.ask.n).map(|index| {
            let mut job = job.clone();
            job.sampling.seed = job.sampling.seed.wrapping_add(index.into());
            job
        });
        Ok(PromptJobs {
            jobs: jobs.collect(),
        })
    }

    fn job(&self, prompt: &Prompt, max_tokens: u32, kinds: &KindRetention) -> Job {
        let mut hints = self.parsed.hints.clone();
        hints.spans.clone_from(&prompt.spans);
        kinds.apply(&mut hints);
        let constrained = self.grammar.is_some();
        Job {
            tokens: prompt.tokens.clone(),
            max_tokens,
            // A grammar that is at its end has nothing to go on with.
            min_tokens: if constrained {
                0
            } else {
                self.ask.min_tokens.min(max_tokens)
            },
            ignore_eos: self.ask.ignore_eos && !constrained,
            stop: self.ask.stop.clone(),
            stop_tokens: self.ask.stop_tokens.clone(),
            rules: self.rules.clone(),
            sampling: self.ask.sampling.clone(),
            grammar: self.grammar.clone(),
            hints,
            salt: self.parsed.salt.clone(),
        }
    }
}

/// How the answer to a conversation is read.
fn rules(engine: &Engine, talk: &Conversation, prompt: &Prompt) -> Rules {
    let style = engine.style();
    let tools = talk.callable();
    Rules {
        calls: (!tools.is_empty()).then_some(style.form),
        names: tools.iter().map(|tool| tool.name.clone()).collect(),
        single: talk.single_call,
        thoughts: match (style.thinks, prompt.is_thinking) {
            (false, _) => Thoughts::None,
            (true, false) => Thoughts::Maybe,
            (true, true) => Thoughts::Open,
        },
    }
}

/// Reads the hints of a request and counts what was not understood.
pub fn read_hints(app: &App, body: &Value, headers: &HeaderMap) -> ParsedHints {
    let pairs: Vec<(&str, &str)> = headers
        .iter()
        .filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)))
        .collect();
    let nvext = body.get("nvext").unwrap_or(&Value::Null);
    let mut parsed = hints::parse_as(app.compat, nvext, body, &pairs);
    in_request::apply_own(&mut parsed);
    read_retention(body, &mut parsed);
    if let Some(tenant) = app.keys.as_ref().and_then(|keys| keys.tenant(headers).ok()) {
        tenant.bind(&mut parsed);
    }
    app.metrics.ignored(parsed.hints.ignored.len());
    parsed
}

/// OpenAI's `prompt_cache_retention`: `in_memory` is what happens anyway, a time retains the prompt
/// for so long without use.
fn read_retention(body: &Value, parsed: &mut ParsedHints) {
    let field = "prompt_cache_retention";
    let Some(value) = body.get(field).filter(|value| !value.is_null()) else {
        return;
    };
    let text = value.as_str().unwrap_or_default();
    if matches!(text, "in_memory" | "in-memory") {
        return;
    }
    match hints::parse_ttl(text) {
        Ok(ttl) => {
            let retention = Retention {
                priority: parsed.hints.priority.saturating_add(1),
                seconds: Some(u32::try_from(ttl.seconds).unwrap_or(u32::MAX)),
            };
            parsed.hints.retain.push((0..u32::MAX, retention));
        }
        Err(error) => {
            let note = format!("{field}: in_memory, or {error}");
            parsed.hints.ignored.push(note);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn prompt_cache_retention_retains_the_prompt_and_what_is_no_time_is_noted() {
        let read = |value: Value| {
            let mut parsed = ParsedHints::default();
            read_retention(&json!({"prompt_cache_retention": value}), &mut parsed);
            parsed.hints
        };
        let day = Retention {
            priority: 1,
            seconds: Some(86_400),
        };
        assert_eq!(read(json!("24h")).retain, [(0..u32::MAX, day)]);
        for nothing in [json!("in_memory"), json!("in-memory"), Value::Null] {
            let hints = read(nothing);
            assert!(hints.retain.is_empty() && hints.ignored.is_empty());
        }
        for odd in [json!("a while"), json!(24)] {
            assert_eq!(read(odd).ignored.len(), 1);
        }
    }
}
