//! One HTTP request in the engine: `n` answers to each prompt, their tokens turned into text,
//! stop strings found, usage counted. Streamed and plain answers both read this one sequence of
//! [`Part`]s, which is why they cannot differ.
//!
//! Dropping a [`Generation`] aborts what still runs: that is how a vanished client stops the work.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use futures_util::StreamExt;
use futures_util::stream::{BoxStream, SelectAll};
use prometheus_client::metrics::histogram::Histogram;
use rootstock::radix::{ContextKind, Token};
use rootstock::scheduler::{CachedTokens, FinishReason, PinReport, TokenLogprob, Usage};
use serde_json::Value;

use crate::app::App;
use crate::chat::derived::AgentTurn;
use crate::control::why::Finding;
use crate::engine_port::{Event, Job, TextStream, Ticket};
use crate::http::api_error::{ApiError, ErrorKind};
use crate::http::lifecycle::{LiveRequest, draining};
use crate::metrics::asked::RequestClass;
use crate::metrics::{Ending, Outcome};
use crate::openai::ends::{Account, engine_gone, error_of};
use crate::request_trace::Traced;
use crate::tools::speech::{Said, Speech};

/// One prompt with the answers wanted for it.
#[derive(Debug)]
pub struct PromptJobs {
    /// One job an answer; all share the prompt.
    pub jobs: Vec<Job>,
}

/// What happens to a request, in order. `choice` counts over all prompts.
#[derive(Debug)]
pub enum Part {
    /// An answer has begun.
    Started {
        /// Which answer.
        choice: usize,
    },
    /// What is certain to be said, with the tokens it came from.
    Said {
        /// Which answer.
        choice: usize,
        /// Text, a thought or a call.
        said: Said,
        /// Tokens since the last part.
        tokens: Vec<TokenOut>,
    },
    /// An answer has ended.
    End {
        /// Which answer.
        choice: usize,
        /// Why.
        finish: Finish,
        /// Tool calls in it.
        calls: usize,
        /// Tokens since the last text, without text of their own.
        tokens: Vec<TokenOut>,
    },
}

/// One output token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOut {
    /// The token.
    pub id: Token,
    /// Its log probability, when asked for.
    pub logprob: Option<TokenLogprob>,
}

/// Why an answer ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it, by this token.
    StopToken(Option<Token>),
    /// This stop string was found.
    StopString(String),
    /// The length was reached.
    #[default]
    Length,
    /// The KV pool could not hold more of it.
    OutOfPages,
}

impl Finish {
    /// OpenAI's `finish_reason`; an answer that the model ended with calls waits for results.
    pub fn reason(&self, calls: usize) -> &'static str {
        match self {
            Finish::StopToken(_) if calls > 0 => "tool_calls",
            Finish::StopToken(_) | Finish::StopString(_) => "stop",
            Finish::Length | Finish::OutOfPages => "length",
        }
    }
}

/// What one answer used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChoiceUsage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens found in the cache at first admission.
    pub cached: CachedTokens,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Nanoseconds from arrival to first admission.
    pub queue_ns: u64,
    /// Nanoseconds from arrival to the first token.
    pub ttft_ns: Option<u64>,
    /// What came of the pins asked for.
    pub pins: PinReport,
    /// The index of the replica that computes it.
    pub replica: u16,
}

/// The running answers of one HTTP request.
pub struct Generation {
    events: SelectAll<BoxStream<'static, (usize, Option<Event>)>>,
    choices: Vec<Choice>,
    ready: VecDeque<Part>,
    open: usize,
    /// What the ids of calls begin with.
    id: String,
    /// What came of the verbs in the request.
    kv_hints: Option<Value>,
    /// The agent whose request it is.
    agent: Option<AgentTurn>,
    account: Account,
    // Last: the request counts as live until its tickets are gone.
    live: LiveRequest,
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation")
            .field("choices", &self.choices.len())
            .field("open", &self.open)
            .finish_non_exhaustive()
    }
}

struct Choice {
    /// On its way into the engine, which may have taken it already.
    submitting: bool,
    ticket: Option<Ticket>,
    text: TextStream,
    speech: Speech,
    /// Tokens whose text is not certain yet.
    pending: Vec<TokenOut>,
    ids: Vec<Token>,
    usage: ChoiceUsage,
    /// The first answer of its prompt: the prompt is counted once.
    counts_prompt: bool,
    class: RequestClass,
    /// What the parts of its prompt are.
    spans: Vec<(Range<u32>, ContextKind)>,
    gaps: Histogram,
    /// For the request trace.
    traced: Option<Traced>,
    submitted: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    finish: Option<Finish>,
}

impl Generation {
    /// Submits all jobs, or none.
    ///
    /// # Errors
    /// Whatever refuses the first job that is refused; those before it are aborted.
    pub async fn start(
        app: &App,
        prompts: Vec<PromptJobs>,
        live: LiveRequest,
        agent: Option<AgentTurn>,
    ) -> Result<Generation, ApiError> {
        let (engine, metrics) = (&app.engine, &app.metrics);
        let trace = app.request_trace.as_ref();
        let first = prompts.first().and_then(|prompt| prompt.jobs.first());
        let program = first.and_then(|job| job.hints.program.as_ref());
        let mut generation = Generation {
            id: app.new_id(""),
            kv_hints: None,
            agent,
            events: SelectAll::new(),
            choices: Vec::new(),
            ready: VecDeque::new(),
            open: 0,
            account: Account::open(app, program),
            live,
        };
        for prompt in prompts {
            for (index, job) in prompt.jobs.into_iter().enumerate() {
                let prompt_tokens = u32::try_from(job.tokens.len()).unwrap_or(u32::MAX);
                let text = engine.text_stream(&job);
                let speech = Speech::new(job.rules.clone());
                let class = RequestClass::of(&job.hints);
                generation.choices.push(Choice {
                    submitting: true,
                    ticket: None,
                    text,
                    speech,
                    pending: Vec::new(),
                    ids: Vec::new(),
                    usage: ChoiceUsage {
                        prompt_tokens,
                        ..ChoiceUsage::default()
                    },
                    counts_prompt: index == 0,
                    class,
                    spans: job.hints.spans.clone(),
                    gaps: metrics.token_gaps(class),
                    traced: trace.filter(|_| index == 0).map(|trace| trace.begin(&job)),
                    submitted: crate::clock::now(),
                    first_token: None,
                    last_token: None,
                    finish: None,
                });
                let submitted = engine.submit(job).await;
                generation.submitted(submitted)?;
            }
        }
        Ok(generation)
    }

    /// The engine took the last choice, or refused it. A client that leaves before this is known
    /// counts as gone like any other: the drop finds the choice.
    fn submitted(&mut self, submitted: Result<Ticket, ApiError>) -> Result<(), ApiError> {
        let index = self.choices.len().saturating_sub(1);
        match submitted {
            Ok(ticket) => {
                self.watch(index, &ticket);
                if let Some(choice) = self.choices.last_mut() {
                    choice.submitting = false;
                    choice.ticket = Some(ticket);
                }
                self.open += 1;
                Ok(())
            }
            Err(error) => {
                self.choices.pop();
                Err(error)
            }
        }
    }

    /// With what came of the verbs in the request.
    #[must_use]
    pub fn answering(mut self, kv_hints: Option<Value>) -> Generation {
        self.kv_hints = kv_hints;
        self
    }

    /// What was found of the first prompt in the cache, why not more, and what came of verbs.
    pub fn why(&self) -> Option<Finding> {
        let found = self.choices.first()?.ticket.as_ref()?.why()?;
        Some(Finding {
            kv_hints: self.kv_hints.clone(),
            ..found.clone()
        })
    }

    fn watch(&mut self, choice: usize, ticket: &Ticket) {
        let events = ticket
            .events()
            .into_stream()
            .map(move |event| (choice, Some(event)));
        // The end of the channel without a final event means that the engine is gone.
        let end = futures_util::stream::once(std::future::ready((choice, None)));
        self.events.push(events.chain(end).boxed());
    }

    /// The next part, `None` after the last. An error is the end too.
    ///
    /// Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Result<Part, ApiError>> {
        loop {
            if let Some(part) = self.ready.pop_front() {
                return Some(Ok(part));
            }
            if self.open == 0 {
                return None;
            }
            let life = Arc::clone(self.live.lifecycle());
            let event = tokio::select! {
                biased;
                () = life.expired() => Err(draining()),
                event = self.events.next() => Ok(event),
            };
            let result = match event {
                Ok(Some((choice, event))) => self.take(choice, event),
                Ok(None) => Err(engine_gone()),
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                self.fail(&error);
                return Some(Err(error));
            }
        }
    }

    /// The id of a call, by which its result refers to it: without the API's own prefix.
    pub fn call_id(&self, choice: usize, call: usize) -> String {
        let id = self.id.trim_start_matches('-');
        format!("{id}{choice:02x}{call:02x}")
    }

    /// The ids of an answer so far.
    pub fn ids(&self, choice: usize) -> &[Token] {
        self.choices.get(choice).map_or(&[], |choice| &choice.ids)
    }

    /// What an answer used so far.
    pub fn usage(&self, choice: usize) -> ChoiceUsage {
        self.choices
            .get(choice)
            .map_or_else(ChoiceUsage::default, |choice| choice.usage)
    }

    /// Number of answers.
    pub fn len(&self) -> usize {
        self.choices.len()
    }

    /// True when there is no answer.
    pub fn is_empty(&self) -> bool {
        self.choices.is_empty()
    }

    /// Prompt tokens, cached tokens and completion tokens of the whole request: each prompt is
    /// counted once however many answers it has.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for choice in &self.choices {
            if choice.counts_prompt {
                totals.prompt_tokens += choice.usage.prompt_tokens;
                totals.cached_tokens += choice.usage.cached.total();
            }
            totals.completion_tokens += choice.usage.completion_tokens;
        }
        totals
    }

    fn take(&mut self, index: usize, event: Option<Event>) -> Result<(), ApiError> {
        let Some(choice) = self.choices.get_mut(index) else {
            return Ok(());
        };
        if choice.finish.is_some() {
            return Ok(());
        }
        match event {
            None => return Err(engine_gone()),
            Some(Event::Started {
                cached,
                prompt_tokens,
                replica,
            }) => {
                if let Some(ticket) = &choice.ticket {
                    ticket.started(cached);
                }
                choice.usage.cached = cached;
                choice.usage.prompt_tokens = prompt_tokens;
                choice.usage.replica = replica.0;
                choice.usage.queue_ns = nanos_since(choice.submitted);
                if choice.counts_prompt {
                    self.account
                        .metrics
                        .started(prompt_tokens, cached, &choice.spans);
                }
                self.ready.push_back(Part::Started { choice: index });
            }
            Some(Event::Tokens { tokens, logprobs }) => {
                let mut logprobs = logprobs
                    .map(|list| list.tokens)
                    .unwrap_or_default()
                    .into_iter();
                for id in tokens {
                    let found = choice.push(TokenOut {
                        id,
                        logprob: logprobs.next(),
                    });
                    let Found { said, stop } = found;
                    choice.hand_out(index, said, &mut self.ready);
                    if let Some(stop) = stop {
                        self.end(index, Finish::StopString(stop));
                        return Ok(());
                    }
                }
            }
            Some(Event::Final { reason, usage }) => self.finish(index, reason, &usage)?,
        }
        Ok(())
    }

    fn finish(
        &mut self,
        index: usize,
        reason: FinishReason,
        usage: &Usage,
    ) -> Result<(), ApiError> {
        let Some(choice) = self.choices.get_mut(index) else {
            return Ok(());
        };
        choice.usage.completion_tokens = usage.completion_tokens;
        choice.usage.queue_ns = usage.queue_ns;
        choice.usage.pins = usage.pins;
        choice.usage.ttft_ns = usage.ttft_ns.or(choice.usage.ttft_ns);
        let finish = match reason {
            FinishReason::Stop => Finish::StopToken(choice.ids.last().copied()),
            FinishReason::StopString => Finish::StopToken(None),
            FinishReason::Length => Finish::Length,
            FinishReason::OutOfPages => Finish::OutOfPages,
            FinishReason::Aborted
            | FinishReason::Failed(_)
            | FinishReason::Expired
            | FinishReason::TooManyPreemptions
            | FinishReason::Displaced => return Err(error_of(reason)),
        };
        let mut said = Vec::new();
        let text = choice.text.finish();
        if !text.is_empty() {
            choice.speech.push(&text, &mut said);
        }
        choice.hand_out(index, said, &mut self.ready);
        self.end(index, finish);
        Ok(())
    }

    fn end(&mut self, index: usize, finish: Finish) {
        let Some(choice) = self.choices.get_mut(index) else {
            return;
        };
        if let Some(ticket) = choice.ticket.take() {
            ticket.close(matches!(finish, Finish::StopString(_)));
        }
        let mut said = Vec::new();
        let whole = matches!(finish, Finish::StopToken(_));
        choice.speech.finish(whole, &mut said);
        choice.hand_out(index, said, &mut self.ready);
        let calls = choice.speech.calls();
        if let Some(agent) = self.agent.as_mut().filter(|_| index == 0) {
            let called = choice.speech.take_called();
            if let Some(kind) = agent.end(called) {
                self.account.metrics.derived(kind);
            }
        }
        let tokens = std::mem::take(&mut choice.pending);
        choice.finish = Some(finish.clone());
        self.open -= 1;
        let outcome = match finish {
            Finish::Length | Finish::OutOfPages => Outcome::Length,
            Finish::StopToken(_) | Finish::StopString(_) => Outcome::Stop,
        };
        let traced = choice.traced.take();
        self.account.close(traced, choice.ending(outcome));
        self.ready.push_back(Part::End {
            choice: index,
            finish,
            calls,
            tokens,
        });
    }

    fn fail(&mut self, error: &ApiError) {
        self.close_all(if error.kind == ErrorKind::Draining {
            Outcome::Cancelled
        } else {
            Outcome::Failed
        });
    }

    /// Accounts for the answers that did not come to their end.
    fn close_all(&mut self, outcome: Outcome) {
        self.open = 0;
        for choice in &mut self.choices {
            let ticket = choice.ticket.take();
            if ticket.is_none() && !std::mem::take(&mut choice.submitting) {
                continue;
            }
            // What was generated but not looked at any more counts as well.
            if let Some(ticket) = ticket {
                for event in ticket.events().try_iter() {
                    if let Event::Tokens { tokens, .. } = event {
                        choice.usage.completion_tokens += count(&tokens);
                    }
                }
            }
            let traced = choice.traced.take();
            self.account.close(traced, choice.ending(outcome));
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.close_all(Outcome::Cancelled);
    }
}

/// Usage of a whole request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Tokens of all prompts.
    pub prompt_tokens: u32,
    /// Of these, found in the cache.
    pub cached_tokens: u32,
    /// Tokens of all answers.
    pub completion_tokens: u32,
}

struct Found {
    said: Vec<Said>,
    stop: Option<String>,
}

impl Choice {
    fn push(&mut self, mut token: TokenOut) -> Found {
        let now = crate::clock::now();
        if self.first_token.is_none() {
            self.first_token = Some(now);
            self.usage.ttft_ns = Some(nanos_since(self.submitted));
        }
        if let Some(before) = self.last_token.replace(now) {
            self.gaps.observe(now.duration_since(before).as_secs_f64());
        }
        self.usage.completion_tokens += 1;
        self.ids.push(token.id);
        let piece = self.text.push(token.id);
        if piece.is_end {
            // Not part of the answer, so neither is its probability.
            token.logprob = None;
        }
        self.pending.push(token);
        let mut said = Vec::new();
        if !piece.text.is_empty() {
            self.speech.push(&piece.text, &mut said);
        }
        Found {
            said,
            stop: piece.stop,
        }
    }

    /// What is said goes out with all tokens that are not out yet.
    fn hand_out(&mut self, index: usize, said: Vec<Said>, ready: &mut VecDeque<Part>) {
        for said in said {
            ready.push_back(Part::Said {
                choice: index,
                said,
                tokens: std::mem::take(&mut self.pending),
            });
        }
    }

    fn ending(&self, outcome: Outcome) -> Ending<'_> {
        Ending {
            class: self.class,
            outcome,
            usage: &self.usage,
            decode: self.decode_seconds(),
            counts_prompt: self.counts_prompt,
            took_s: crate::clock::now()
                .duration_since(self.submitted)
                .as_secs_f64(),
        }
    }

    /// Seconds from the first to the last token, and the number of tokens after the first.
    fn decode_seconds(&self) -> Option<(f64, u32)> {
        let (first, last) = (self.first_token?, self.last_token?);
        let tokens = self
            .usage
            .completion_tokens
            .checked_sub(1)
            .filter(|tokens| *tokens > 0)?;
        Some((last.duration_since(first).as_secs_f64(), tokens))
    }
}

fn count(tokens: &[Token]) -> u32 {
    u32::try_from(tokens.len()).unwrap_or(u32::MAX)
}

fn nanos_since(from: Instant) -> u64 {
    let elapsed = crate::clock::now().duration_since(from).as_nanos();
    u64::try_from(elapsed).unwrap_or(u64::MAX)
}
