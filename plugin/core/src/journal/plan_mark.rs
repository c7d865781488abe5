//! What a journal keeps of a plan: a hash over all its fields, a hash over what callers heard up to
//! it, and a summary for people.
//!
//! The hash is XXH3-64 over a canonical byte string. Each struct is taken apart by name, so a
//! field added to a plan does not compile until it is hashed. Lists are preceded by their length.

use std::ops::Range;

use rootstock_memory::{PageId, StepId};
use rootstock_scheduler::{Emit, History, Row, RowInput, SampleSpec, SamplingParams, StepPlan};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// A plan's mark in the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanMark {
    /// Hash over all fields; 0 when there was no plan.
    pub hash: u64,
    /// Chained hash over all events of all calls before the plan was taken.
    pub heard: u64,
    /// The plan in numbers; None when there was no plan.
    pub summary: Option<PlanSummary>,
}

/// A plan in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanSummary {
    /// The step.
    pub step: StepId,
    /// Rows of the plan.
    pub rows: u32,
    /// Rows that sample.
    pub sampled: u32,
    /// Input tokens.
    pub tokens: u32,
    /// Entries of all page tables.
    pub pages: u32,
    /// Copies.
    pub copies: u32,
}

impl std::fmt::Display for PlanMark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let heard = self.heard;
        let Some(summary) = self.summary else {
            return write!(f, "no plan, events {heard:016x}");
        };
        let PlanSummary {
            step,
            rows,
            sampled,
            tokens,
            pages,
            copies,
        } = summary;
        write!(
            f,
            "step {}: {rows} rows ({sampled} sample), {tokens} tokens, {pages} table entries, \
             {copies} copies, hash {:016x}, events {heard:016x}",
            step.0, self.hash
        )
    }
}

/// Computes marks with one reused buffer.
#[derive(Debug, Default)]
pub struct PlanHasher {
    bytes: Vec<u8>,
    heard: u64,
}

impl PlanHasher {
    /// The mark of a plan, or of its absence.
    ///
    /// # Cost
    /// Linear in the plan's tokens and page tables; no allocation once the buffer has grown.
    pub fn mark(&mut self, plan: Option<&StepPlan>) -> PlanMark {
        let heard = self.heard;
        let Some(plan) = plan else {
            return PlanMark {
                heard,
                ..PlanMark::default()
            };
        };
        self.bytes.clear();
        self.plan(plan);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let sampled = plan.rows.iter().filter(|row| row.sample.is_some()).count();
        let summary = PlanSummary {
            step: plan.id,
            rows: count(plan.rows.len()),
            sampled: count(sampled),
            tokens: count(plan.tokens.len()),
            pages: count(plan.page_tables.len()),
            copies: count(plan.copies.len()),
        };
        PlanMark {
            hash: xxh3_64(&self.bytes),
            heard,
            summary: Some(summary),
        }
    }

    /// Takes in the events of one call, in order.
    pub fn hear(&mut self, emits: &[Emit]) {
        if emits.is_empty() {
            return;
        }
        self.bytes.clear();
        for emit in emits {
            self.emit(emit);
        }
        self.heard = xxh3_64_with_seed(&self.bytes, self.heard);
    }

    fn emit(&mut self, emit: &Emit) {
        self.u64(emit.request().0);
        self.u64(emit.label());
        match emit {
            // The one event that comes by the thousand.
            Emit::Tokens {
                request: _,
                label: _,
                tokens,
                logprobs: None,
            } => {
                self.u32(0);
                self.u32s(tokens);
            }
            Emit::Started { .. } | Emit::Tokens { .. } | Emit::Final { .. } => {
                self.u32(1);
                self.value(emit);
            }
        }
    }

    fn plan(&mut self, plan: &StepPlan) {
        let StepPlan {
            id,
            replica,
            rows,
            tokens,
            page_tables,
            copies,
            after,
            overtakes,
        } = plan;
        self.u64(id.0);
        self.u32(u32::from(replica.0));
        self.len(rows.len());
        for row in rows {
            self.row(row);
        }
        self.u32s(tokens);
        self.pages(page_tables);
        self.value(copies);
        self.value(after);
        self.u32(u32::from(*overtakes));
    }

    fn row(&mut self, row: &Row) {
        let Row {
            request,
            ns,
            tokens,
            input,
            first_pos,
            len,
            pages,
            sample,
            drafts,
            guesses,
            mask,
        } = row;
        self.u64(request.0);
        self.u64(ns.get());
        self.range(tokens);
        match input {
            RowInput::Known => self.u32(0),
            RowInput::FromStep { step, row } => {
                self.u32(1);
                self.u64(step.0);
                self.u32(*row);
            }
        }
        self.u32(*first_pos);
        self.u32(*len);
        self.range(pages);
        self.u32(u32::from(*drafts));
        self.range(guesses);
        match mask {
            None => self.u32(0),
            Some(mask) => {
                self.u32(1);
                self.u64(mask.0);
            }
        }
        match sample {
            None => self.u32(0),
            Some(sample) => {
                self.u32(1);
                self.sample(sample);
            }
        }
    }

    fn sample(&mut self, sample: &SampleSpec) {
        let SampleSpec {
            params,
            output_index,
            suppress,
            history,
        } = sample;
        self.params(params);
        self.u32(*output_index);
        self.u32(u32::from(suppress.is_some()));
        self.u32s(suppress.as_deref().unwrap_or_default());
        match history {
            None => self.u32(0),
            Some(History {
                tokens,
                prompt_tokens,
            }) => {
                self.u32(1);
                self.u32s(tokens);
                self.u32(*prompt_tokens);
            }
        }
    }

    fn params(&mut self, params: &SamplingParams) {
        let SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            logit_bias,
            logprobs,
        } = params;
        for number in [temperature, top_p, min_p] {
            self.u32(number.to_bits());
        }
        for number in [repetition_penalty, frequency_penalty, presence_penalty] {
            self.u32(number.to_bits());
        }
        self.u32(*top_k);
        self.u64(*seed);
        self.len(logit_bias.len());
        for (token, bias) in logit_bias {
            self.u32(*token);
            self.u32(bias.to_bits());
        }
        self.u32(logprobs.map_or(u32::MAX, u32::from));
    }

    fn u32(&mut self, word: u32) {
        self.bytes.extend_from_slice(&word.to_le_bytes());
    }

    fn range(&mut self, range: &Range<u32>) {
        self.u32(range.start);
        self.u32(range.end);
    }

    fn u64(&mut self, word: u64) {
        self.bytes.extend_from_slice(&word.to_le_bytes());
    }

    fn len(&mut self, len: usize) {
        self.u64(len as u64);
    }

    fn u32s(&mut self, words: &[u32]) {
        self.list(words, |word| *word);
    }

    fn pages(&mut self, pages: &[PageId]) {
        self.list(pages, |page| page.get());
    }

    /// Block by block, so that the long lists of a plan are copied by vector instructions.
    fn list<T>(&mut self, items: &[T], word: impl Fn(&T) -> u32) {
        self.len(items.len());
        self.bytes.reserve(4 * items.len());
        for block in items.chunks(64) {
            let mut bytes = [0; 256];
            for (slot, item) in bytes.chunks_exact_mut(4).zip(block) {
                slot.copy_from_slice(&word(item).to_le_bytes());
            }
            self.bytes.extend_from_slice(&bytes[..4 * block.len()]);
        }
    }

    /// A plain value in postcard's form, which is self-delimiting for a known type.
    fn value<T: Serialize>(&mut self, value: &T) {
        if postcard::to_io(value, &mut self.bytes).is_err() {
            // Plain values always serialize; if one did not, the mark still follows from it alone.
            self.bytes.push(u8::MAX);
        }
    }
}
