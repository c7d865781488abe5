//! `rootstock replay --exact`: feeds a journal to a new core and compares every plan.

use std::fs::File;
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};

use rootstock::journal::{self, JournalError, ReplayEnd, StepSample};
use rootstock::scheduler::StepTime;

/// A replay that found a difference, or could not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The file.
    #[error("cannot read the journal {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Its content.
    #[error("journal {}: {source}", path.display())]
    Journal {
        /// The file.
        path: PathBuf,
        /// Why.
        source: JournalError,
    },
    /// The core of today plans otherwise than the one of the recording.
    #[error("{mismatches} of {plans} plans differ, the first after input {input}")]
    Differs {
        /// Plans that differ.
        mismatches: u64,
        /// Plans compared.
        plans: u64,
        /// Inputs before the first difference.
        input: u64,
    },
    /// The report could not be written.
    #[error("cannot write the report: {0}")]
    Write(#[from] io::Error),
}

/// Replays a journal and writes what was found to `out`.
///
/// # Errors
/// When the journal cannot be read, or any plan differs.
pub fn run(path: &Path, out: &mut impl Write) -> Result<(), ReplayError> {
    let file = File::open(path).map_err(|source| ReplayError::Open {
        path: path.to_owned(),
        source,
    })?;
    let report = journal::replay(BufReader::new(file)).map_err(|source| ReplayError::Journal {
        path: path.to_owned(),
        source,
    })?;
    let end = match report.end {
        ReplayEnd::Closed => "closed in order".to_owned(),
        ReplayEnd::Full => "full; the run went on unrecorded".to_owned(),
        ReplayEnd::Cut => "cut between two entries".to_owned(),
        ReplayEnd::Torn { offset_bytes } => format!("torn inside an entry at byte {offset_bytes}"),
    };
    writeln!(out, "written by   {}", report.written_by)?;
    writeln!(out, "inputs       {}", report.inputs)?;
    writeln!(
        out,
        "plans        {} compared, {} differ",
        report.plans, report.mismatches
    )?;
    writeln!(out, "events       {}", report.emits)?;
    if let Some(told) = step_times(&report.steps) {
        writeln!(out, "step times   {told}")?;
    }
    writeln!(out, "journal end  {end}")?;
    match report.first_mismatch {
        None => Ok(()),
        Some(first) => Err(ReplayError::Differs {
            mismatches: report.mismatches,
            plans: report.plans,
            input: first.input,
        }),
    }
}

/// How well the scheduler's model of step times told each recorded step before it ran, and the
/// model at the end; None for a run that is too short to learn from.
fn step_times(steps: &[StepSample]) -> Option<String> {
    let mut model = StepTime::default();
    let mut errors = Vec::new();
    for &StepSample { load, ns } in steps {
        if let Some(told) = model.predict(load).filter(|_| ns > 0) {
            errors.push(told.abs_diff(ns).saturating_mul(1_000) / ns);
        }
        model.learn(load, ns);
    }
    errors.sort_unstable();
    let permille = |percent: usize| errors.get(errors.len() * percent / 100).copied();
    let (half, most) = (permille(50)?, permille(95)?);
    let [base, token, draw, one, chunk] = model.coefficients();
    Some(format!(
        "{} steps: {:.2} ms + {:.1} us a token + {:.1} us a draw + {one:.1} ns a KV position of \
         a decode + {chunk:.1} ns one of a chunk; told ahead within {}.{} % at the median, {}.{} \
         % at p95",
        steps.len(),
        base / 1e6,
        token / 1e3,
        draw / 1e3,
        half / 10,
        half % 10,
        most / 10,
        most % 10
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rootstock::scheduler::StepLoad;

    #[test]
    fn step_times_are_told_ahead_where_they_follow_the_load() {
        let step = |at: u64, noise: u64| {
            let (tokens, kv_one, kv_chunk) = (1 + at % 200, at * 37 % 5_000, at * 91 % 7_000);
            let ns = 8_000_000 + tokens * 40_000 + kv_one * 60 + kv_chunk * 6;
            let tokens = u32::try_from(tokens).unwrap();
            let load = StepLoad {
                tokens,
                draws: tokens % 7,
                kv_one,
                kv_chunk,
            };
            let ns = ns + u64::from(load.draws) * 500_000 + at * noise % 20_000_000;
            StepSample { load, ns }
        };
        let even: Vec<_> = (0..500).map(|at| step(at, 0)).collect();
        let told = step_times(&even).unwrap();
        assert!(told.contains("8.00 ms + 40.0 us a token"), "{told}");
        assert!(told.contains("within 0.0 % at the median"), "{told}");
        let noisy: Vec<_> = (0..500).map(|at| step(at, 7_919_777)).collect();
        let told = step_times(&noisy).unwrap();
        assert!(!told.contains("within 0."), "{told}");
        assert_eq!(step_times(&even[..16]), None);
    }

    #[test]
    fn a_file_that_is_no_journal_is_named_in_one_line() {
        let path =
            std::env::temp_dir().join(format!("rootstock-no-journal-{}", std::process::id()));
        std::fs::write(&path, b"something else entirely").unwrap();
        let error = run(&path, &mut Vec::new()).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(
            error.contains("not a journal") && !error.contains('\n'),
            "{error}"
        );
        let error = run(&path, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.starts_with("cannot read the journal"), "{error}");
    }
}
