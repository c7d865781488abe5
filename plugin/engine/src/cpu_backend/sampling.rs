//! From the hidden states of a step to one drawn token per sampling row.

use rootstock::StepError;
use rootstock::memory::StepId;
use rootstock::radix::Token;
use rootstock::scheduler::{
    Logprobs, RowInput, RowOut, SampleSpec, StepOutput, StepPlan, TokenLogprob,
};
use rootstock_kernels::{KernelError, SampleArgs, SampleScratch, sample};

use super::{CpuBackend, failed};

/// A position whose logits are drawn from: the last of a row, or one of its guesses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Site {
    /// Row of the plan.
    row: usize,
    /// Guesses of the row before it.
    guesses: u32,
    /// Token of the step.
    token: usize,
}

impl CpuBackend {
    /// Draws for each row that samples; the others, and rows left out, answer with no token.
    ///
    /// A row with guesses draws at its own end first, then after each guess as long as the token
    /// drawn before was the guessed one: the same draws from the same logits as in as many steps.
    pub(super) fn sample_rows(&mut self, plan: &StepPlan) -> Result<StepOutput, StepError> {
        let mut output = StepOutput {
            rows: vec![RowOut::default(); plan.rows.len()],
        };
        let mut sites = std::mem::take(&mut self.buffers.sites);
        self.list_sites(plan, &mut sites);
        let drawn = sites
            .chunks(Self::logit_rows())
            .try_for_each(|sites| self.draw_sites(plan, sites, &mut output));
        self.buffers.sites = sites;
        drawn.map_err(failed(plan.id))?;
        Ok(output)
    }

    fn list_sites(&self, plan: &StepPlan, sites: &mut Vec<Site>) {
        sites.clear();
        for (index, (row, start)) in plan.rows.iter().zip(&self.buffers.starts).enumerate() {
            let (Some(start), Some(_)) = (*start, &row.sample) else {
                continue;
            };
            let last = start + row.len as usize - 1;
            let ends = (last..).zip(0..=row.guess_count());
            sites.extend(ends.map(|(token, guesses)| Site {
                row: index,
                guesses,
                token,
            }));
        }
    }

    fn draw_sites(
        &mut self,
        plan: &StepPlan,
        sites: &[Site],
        output: &mut StepOutput,
    ) -> Result<(), KernelError> {
        let vocab = self.caps.vocab as usize;
        let mut tokens = [0; Self::logit_rows()];
        for (token, site) in tokens.iter_mut().zip(sites) {
            *token = site.token;
        }
        self.logits_of(tokens.get(..sites.len()).unwrap_or_default())?;
        let b = &mut self.buffers;
        for (site, logits) in sites.iter().zip(b.logits.chunks_exact_mut(vocab)) {
            let (Some(row), Some(out)) = (plan.rows.get(site.row), output.rows.get_mut(site.row))
            else {
                continue;
            };
            let Some(spec) = &row.sample else { continue };
            let before = plan.row_guesses(row).get(..site.guesses as usize);
            if before != Some(out.accepted.as_slice()) {
                continue;
            }
            let index = spec.output_index + site.guesses;
            let masks = self.masks.as_deref();
            let mask = masks.and_then(|masks| masks.allowed(row.request, index));
            let drawn = draw_at((spec, index), logits, mask.as_deref(), &mut b.sampler)?;
            if let (Some(masks), Some(token)) = (masks, drawn.accepted.last()) {
                masks.drawn(row.request, index, *token);
            }
            out.accepted.extend(drawn.accepted);
            match (&mut out.logprobs, drawn.logprobs) {
                (Some(all), Some(new)) => all.tokens.extend(new.tokens),
                (none, new) => *none = new,
            }
        }
        Ok(())
    }
}

/// Adds to each history that lacks it the token that its row continues from.
pub(crate) fn complete_histories(
    plan: &mut StepPlan,
    drawn: impl Fn(StepId, u32) -> Option<Token>,
) {
    for row in &mut plan.rows {
        let RowInput::FromStep { step, row: index } = row.input else {
            continue;
        };
        let spec = row.sample.as_mut();
        let history = spec.and_then(|spec| spec.history.as_mut());
        if let (Some(history), Some(token)) = (history, drawn(step, index)) {
            history.tokens.push(token);
        }
    }
}

/// Draws one token as a plan asks for it.
#[cfg_attr(
    not(feature = "cuda"),
    expect(dead_code, reason = "the CUDA backend draws so")
)]
pub(crate) fn draw(
    spec: &SampleSpec,
    logits: &mut [f32],
    mask: Option<&[u32]>,
    scratch: &mut SampleScratch,
) -> Result<RowOut, KernelError> {
    draw_at((spec, spec.output_index), logits, mask, scratch)
}

/// The same for another output of the request.
fn draw_at(
    (spec, output_index): (&SampleSpec, u32),
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
        output_index,
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
