//! `rootstock replay --exact`: feeds a journal to a new core and compares every plan.

use std::fs::File;
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};

use rootstock::journal::{self, JournalError, ReplayEnd};

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

#[cfg(test)]
mod tests {
    use super::*;

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
