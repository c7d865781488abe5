//! Plans and their results: what one step computes, as plain arrays.
//!
//! A step is a list of rows. A row computes positions `first_pos .. first_pos + len` of one
//! request and, when it has a [`SampleSpec`], draws the token that follows. The KV of position
//! `p` belongs on page `pages[p / page_tokens]`, slot `p % page_tokens`.
//!
//! Backends run plans in the order of their step ids. A row may take its first input token from
//! a row of the step before ([`RowInput::FromStep`]), so a second step can be launched while the
//! first still runs.
//!
//! Speculation: a row with `drafts = d` may, after its own tokens, verify up to `d` guessed
//! tokens on positions `first_pos + len ..`; its page table covers them. The guesses are in the
//! plan, or the backend makes them. The row then returns between 1 and `d + 1` accepted tokens.
//! KV beyond the accepted tokens counts as not computed.

use std::ops::Range;
use std::sync::Arc;

use rootstock_memory::{CopyId, CopyPlan, PageId, ReplicaId, StepId};
use rootstock_radix::{NamespaceId, Token};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::request::{RequestId, SamplingParams};
use crate::time::StepLoad;
use crate::word_hash::WordHash;

/// What one step computes.
#[derive(Debug)]
pub struct StepPlan {
    /// Ascending from 1 in each scheduler.
    pub id: StepId,
    /// Whose pages the tables name.
    pub replica: ReplicaId,
    /// At most one row a request: decodes first, then prefill chunks; where the step is made for
    /// requests that hurry, theirs first.
    pub rows: Vec<Row>,
    /// Input tokens of all rows, one after the other, each row's guesses behind its own.
    pub tokens: Vec<Token>,
    /// Page tables of all rows, one after the other.
    pub page_tables: Vec<PageId>,
    /// Copies to submit before this step.
    pub copies: Vec<CopyPlan>,
    /// Copies that must have finished before this step starts; where the backend orders layers,
    /// each layer of them before that layer of the step. Where one of them fails, the step does.
    pub after: Vec<CopyId>,
    /// May run in the middle of the step in flight, and its result be told first. It reads and
    /// writes nothing that the other writes.
    pub overtakes: bool,
}

/// One request's part of a step.
#[derive(Clone, Debug)]
pub struct Row {
    /// Whose row.
    pub request: RequestId,
    /// Namespace of the request: part of the identity of its KV.
    pub ns: NamespaceId,
    /// Range of the input tokens in `StepPlan::tokens`; `len` of them.
    pub tokens: Range<u32>,
    /// Where the first input token comes from.
    pub input: RowInput,
    /// Position of the first input token, in tokens from the start of the prompt.
    pub first_pos: u32,
    /// Positions computed.
    pub len: u32,
    /// Range of the page table in `StepPlan::page_tables`. Covers positions
    /// `0 .. first_pos + len + drafts`.
    pub pages: Range<u32>,
    /// How to draw the next token. None: a prefill chunk that is not the last.
    pub sample: Option<SampleSpec>,
    /// Guessed tokens the backend may verify beyond the drawn one.
    pub drafts: u8,
    /// Range of those guesses in `StepPlan::tokens`; empty where the backend guesses itself.
    pub guesses: Range<u32>,
    /// Grammar mask to apply to the draw.
    pub mask: Option<MaskId>,
}

/// Where the first input token of a row comes from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum RowInput {
    /// It is in the plan.
    Known,
    /// It is the token drawn by this row of an earlier step; the plan holds 0 in its place.
    FromStep {
        /// The earlier step.
        step: StepId,
        /// Index of the row in it.
        row: u32,
    },
}

/// Grammar mask of a request, kept by the caller.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct MaskId(pub u64);

/// How to draw one token.
#[derive(Clone, Debug)]
pub struct SampleSpec {
    /// Parameters of the request.
    pub params: Arc<SamplingParams>,
    /// Index of the token in the output, from 0. The draw is a function of
    /// (`params.seed`, `output_index`) and the logits.
    pub output_index: u32,
    /// Tokens that must not be drawn: the stop tokens while the output is below its minimum.
    pub suppress: Option<Arc<[Token]>>,
    /// Present only when `params` has penalties. Where the row continues from a step in flight,
    /// the token drawn there is missing at its end: the backend adds it.
    pub history: Option<History>,
}

/// Tokens before the draw, for penalties.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct History {
    /// Prompt and output so far.
    pub tokens: Vec<Token>,
    /// Length of the prompt in it.
    pub prompt_tokens: u32,
}

/// What a step computed. Rows are those of the plan, in its order.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct StepOutput {
    /// One a row.
    pub rows: Vec<RowOut>,
}

/// What one row drew.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct RowOut {
    /// 1 to `drafts + 1` tokens for a row with a `SampleSpec`, else none.
    pub accepted: SmallVec<[Token; 8]>,
    /// Log probabilities, one entry an accepted token, when asked for.
    pub logprobs: Option<Box<Logprobs>>,
}

/// Log probabilities of accepted tokens.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Logprobs {
    /// One an accepted token.
    pub tokens: Vec<TokenLogprob>,
}

/// Log probability of one token and of its strongest alternatives.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token.
    pub token: Token,
    /// Its natural log probability.
    pub logprob: f32,
    /// The most probable tokens, best first.
    pub top: Vec<(Token, f32)>,
}

impl StepPlan {
    /// Hash of which tokens are computed and copied onto which pages, for tests that compare runs
    /// of one build. It leaves out how tokens are drawn; a journal has a mark of its own, over
    /// every field.
    ///
    /// # Cost
    /// Linear in tokens and page tables.
    pub fn fingerprint(&self) -> u64 {
        let mut f = WordHash::new();
        f.word(self.id.0);
        f.word(u64::from(self.replica.0));
        for row in &self.rows {
            row.mix_into(&mut f);
        }
        self.tokens.iter().for_each(|&t| f.word(u64::from(t)));
        self.page_tables
            .iter()
            .for_each(|&p| f.word(u64::from(p.get())));
        for copy in &self.copies {
            f.word(copy.id.0);
            copy.from
                .1
                .iter()
                .chain(&copy.to.1)
                .for_each(|&p| f.word(u64::from(p.get())));
            f.word(u64::from(copy.layers.start) << 16 | u64::from(copy.layers.end));
        }
        self.after.iter().for_each(|&c| f.word(c.0));
        f.get()
    }

    /// What its rows compute and read, guesses in the plan included; what its time depends on.
    pub fn load(&self) -> StepLoad {
        let rows = self.rows.iter();
        let load = StepLoad::of(rows.map(|row| {
            let positions = row.len + row.guess_count();
            (row.first_pos, positions, row.sample.is_some())
        }));
        // Each guess is drawn as well, to verify it.
        let guesses: u32 = self.rows.iter().map(Row::guess_count).sum();
        StepLoad {
            draws: load.draws + guesses,
            ..load
        }
    }

    /// Input tokens of a row.
    ///
    /// # Panics
    /// If the row is not of this plan.
    pub fn row_tokens(&self, row: &Row) -> &[Token] {
        &self.tokens[row.tokens.start as usize..row.tokens.end as usize]
    }

    /// Guesses of a row that are in the plan.
    ///
    /// # Panics
    /// If the row is not of this plan.
    pub fn row_guesses(&self, row: &Row) -> &[Token] {
        &self.tokens[row.guesses.start as usize..row.guesses.end as usize]
    }

    /// Page table of a row.
    ///
    /// # Panics
    /// If the row is not of this plan.
    pub fn row_pages(&self, row: &Row) -> &[PageId] {
        &self.page_tables[row.pages.start as usize..row.pages.end as usize]
    }
}

impl Row {
    /// Guesses in the plan.
    pub fn guess_count(&self) -> u32 {
        self.guesses.end - self.guesses.start
    }

    fn mix_into(&self, f: &mut WordHash) {
        f.word(self.request.0);
        f.word(u64::from(self.first_pos) << 32 | u64::from(self.len));
        f.word(u64::from(self.tokens.start) << 32 | u64::from(self.pages.start));
        match self.input {
            RowInput::Known => f.word(0),
            RowInput::FromStep { step, row } => {
                f.word(step.0);
                f.word(u64::from(row) + 1);
            }
        }
        f.word(
            self.sample
                .as_ref()
                .map_or(0, |s| u64::from(s.output_index) + 1),
        );
        f.word(self.mask.map_or(0, |m| m.0.wrapping_add(1)));
        f.word(u64::from(self.drafts));
        f.word(u64::from(self.guesses.start) << 32 | u64::from(self.guesses.end));
    }
}
