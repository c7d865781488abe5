//! How long prompts take: the scheduler's model of step times, fitted to the steps of a journal
//! that was recorded on the machine in question.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use rootstock::journal;
use rootstock::scheduler::{StepLoad, StepTime};

use super::error::ReplayError;

/// Tokens of a prompt that one step computes.
const STEP_TOKENS: u64 = 512;

/// Fitted step times.
#[derive(Clone, Debug)]
pub(crate) struct StepModel(StepTime);

impl StepModel {
    /// Fits the steps of a journal.
    ///
    /// # Errors
    /// The journal cannot be read, or has too few steps to tell.
    pub(crate) fn of_journal(path: &Path) -> Result<Self, ReplayError> {
        let file = File::open(path).map_err(|source| ReplayError::File {
            path: path.to_owned(),
            source,
        })?;
        let report = journal::replay(BufReader::new(file));
        let report = report.map_err(|source| ReplayError::Journal {
            path: path.to_owned(),
            source,
        })?;
        let mut model = StepTime::default();
        for step in &report.steps {
            model.learn(step.load, step.ns);
        }
        match model.predict(StepLoad::default()) {
            Some(_) => Ok(Self(model)),
            None => Err(ReplayError::FewSteps {
                path: path.to_owned(),
                steps: report.steps.len(),
            }),
        }
    }

    /// Nanoseconds to compute a prompt of which the first `cached` tokens are there, alone on the
    /// machine.
    pub(crate) fn prefill_ns(&self, prompt: u64, cached: u64) -> u64 {
        let (mut at, mut ns) = (cached, 0_u64);
        while at < prompt {
            let len = STEP_TOKENS.min(prompt - at);
            let narrow = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
            let row = (narrow(at), narrow(len), at + len == prompt);
            let step = self.0.predict(StepLoad::of([row].into_iter()));
            ns = ns.saturating_add(step.unwrap_or_default());
            at += len;
        }
        ns
    }

    /// A machine on which a token takes so long and nothing else does anything.
    #[cfg(test)]
    pub(crate) fn of_rate(token_ns: u64) -> Self {
        let mut model = StepTime::default();
        for tokens in (1..=8).cycle().take(400) {
            let load = StepLoad {
                tokens,
                ..StepLoad::default()
            };
            model.learn(load, token_ns * u64::from(tokens));
        }
        Self(model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cached_takes_no_time() {
        let model = StepModel::of_rate(1_000_000);
        let [whole, half, last] = [0, 1000, 1999].map(|cached| model.prefill_ns(2000, cached));
        assert!(whole.abs_diff(2_000_000_000) < 40_000_000, "{whole}");
        assert!(half.abs_diff(whole / 2) < 20_000_000, "{half}");
        assert!(last < 3_000_000, "{last}");
        assert_eq!(model.prefill_ns(2000, 2000), 0);
    }

    #[test]
    fn a_file_that_is_no_journal_is_named() {
        let error = StepModel::of_journal(Path::new("no/such.journal")).unwrap_err();
        assert!(error.to_string().contains("no/such.journal"), "{error}");
    }
}
