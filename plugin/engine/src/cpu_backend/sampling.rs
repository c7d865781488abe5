//! From the hidden states of a step to one drawn token per sampling row.

use rootstock::StepError;
use rootstock::scheduler::{Logprobs, Row, RowOut, SampleSpec, StepOutput, StepPlan, TokenLogprob};
use rootstock_kernels::{KernelError, SampleArgs, SampleScratch, sample};

use super::{CpuBackend, failed};

impl CpuBackend {
    /// Draws for each row that samples; the others, and rows left out, answer with no token.
    pub(super) fn sample_rows(&mut self, plan: &StepPlan) -> Result<StepOutput, StepError> {
        let mut output = StepOutput {
            rows: vec![RowOut::default(); plan.rows.len()],
        };
        let vocab = self.caps.vocab as usize;
        let mut at = 0;
        while at < plan.rows.len() {
            let mut last = [0_usize; Self::logit_rows()];
            let mut rows = [0_usize; Self::logit_rows()];
            let mut count = 0;
            for (slot, row) in last.iter_mut().zip(&mut rows) {
                let Some((index, token)) = self.next_sampling(plan, at) else {
                    at = plan.rows.len();
                    break;
                };
                (*slot, *row) = (token, index);
                at = index + 1;
                count += 1;
            }
            let (Some(last), Some(rows)) = (last.get(..count), rows.get(..count)) else {
                break;
            };
            if count == 0 {
                break;
            }
            self.logits_of(last).map_err(failed(plan.id))?;
            let b = &mut self.buffers;
            for (&index, logits) in rows.iter().zip(b.logits.chunks_exact_mut(vocab)) {
                let (Some(row), Some(out)) = (plan.rows.get(index), output.rows.get_mut(index))
                else {
                    continue;
                };
                if let Some(spec) = &row.sample {
                    let index = spec.output_index;
                    let masks = self.masks.as_deref();
                    let mask = masks.and_then(|masks| masks.allowed(row.request, index));
                    *out = draw(spec, logits, mask.as_deref(), &mut b.sampler)
                        .map_err(failed(plan.id))?;
                    if let (Some(masks), Some(token)) = (masks, out.accepted.last()) {
                        masks.drawn(row.request, index, *token);
                    }
                }
            }
        }
        Ok(output)
    }

    /// The next row from `at` on that samples, with the index of its last token in the step.
    fn next_sampling(&self, plan: &StepPlan, at: usize) -> Option<(usize, usize)> {
        let ends = |(index, (row, start)): (usize, (&Row, &Option<usize>))| {
            let start = (*start)?;
            row.sample
                .as_ref()
                .map(|_| (index, start + row.len as usize - 1))
        };
        plan.rows
            .iter()
            .zip(&self.buffers.starts)
            .enumerate()
            .skip(at)
            .find_map(ends)
    }
}

/// Draws one token as a plan asks for it.
pub(crate) fn draw(
    spec: &SampleSpec,
    logits: &mut [f32],
    mask: Option<&[u32]>,
    scratch: &mut SampleScratch,
) -> Result<RowOut, KernelError> {
    for &token in spec.suppress.iter().flat_map(|tokens| tokens.iter()) {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    let params = &spec.params;
    let (prompt, output) = spec.history.as_ref().map_or((&[][..], &[][..]), |history| {
        let prompt = (history.prompt_tokens as usize).min(history.tokens.len());
        history.tokens.split_at(prompt)
    });
    let args = SampleArgs {
        temperature: params.temperature,
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        seed: params.seed,
        output_index: spec.output_index,
        repetition_penalty: params.repetition_penalty,
        frequency_penalty: params.frequency_penalty,
        presence_penalty: params.presence_penalty,
        prompt,
        output,
        logit_bias: &params.logit_bias,
        mask,
        logprobs: params.logprobs,
    };
    let drawn = sample(logits, &args, scratch)?;
    let logprobs = drawn.logprob.map(|logprob| {
        let token = TokenLogprob {
            token: drawn.token,
            logprob,
            top: drawn.top,
        };
        Box::new(Logprobs {
            tokens: vec![token],
        })
    });
    Ok(RowOut {
        accepted: std::iter::once(drawn.token).collect(),
        logprobs,
    })
}
