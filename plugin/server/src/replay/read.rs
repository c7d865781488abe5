//! Reading a trace file: plain or gzip, Mooncake rows or the events of a request trace, told apart
//! by their bytes. Lines are bounded; every complaint names its line.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use indicatif::ProgressBar;

use super::block_size::BlockSize;
use super::error::ReplayError;
use super::mooncake;
use super::request_trace::{self, Replayed};
use super::row::Row;
use super::signals::Signal;
use super::trace::{Trace, TraceBuilder};

/// Bytes of a line, at most: a prompt of 10 million tokens in 16-token blocks takes 13 MB.
const LINE_BYTES_MAX: usize = 16 << 20;

/// First bytes of a gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Which form the rows have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TraceForm {
    /// One request a line with `hash_ids`: Mooncake's, and what took over its form.
    Mooncake,
    /// `dynamo.request.trace.v1`: one event a line.
    RequestTrace,
}

/// A trace and what its file says about itself.
#[derive(Debug)]
pub(crate) struct TraceFile {
    /// The requests.
    pub(crate) trace: Trace,
    /// The form of the rows.
    pub(crate) form: TraceForm,
    /// Tokens of a block.
    pub(crate) page_tokens: u32,
    /// Rows whose count of hash ids does not fit their `input_length`.
    pub(crate) misfits: u64,
}

/// Reads the file at `path`; `page_tokens` is `--page-size`, `wanted` is `--signals`.
///
/// # Errors
/// The file cannot be read, a line is not a row, or the block size stays unknown.
pub(crate) fn read_file(
    path: &Path,
    page_tokens: Option<u32>,
    wanted: &[Signal],
    progress: &ProgressBar,
) -> Result<TraceFile, ReplayError> {
    let failed = |source| ReplayError::File {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(failed)?;
    progress.set_length(file.metadata().map_err(failed)?.len());
    let mut bytes = BufReader::with_capacity(1 << 16, progress.wrap_read(file));
    if bytes.fill_buf().map_err(failed)?.starts_with(&GZIP_MAGIC) {
        read(
            BufReader::with_capacity(1 << 16, MultiGzDecoder::new(bytes)),
            page_tokens,
            wanted,
        )
    } else {
        read(bytes, page_tokens, wanted)
    }
}

/// Reads rows to their end.
///
/// # Errors
/// As [`read_file`].
pub(crate) fn read(
    source: impl BufRead,
    page_tokens: Option<u32>,
    wanted: &[Signal],
) -> Result<TraceFile, ReplayError> {
    let mut lines = Lines {
        source,
        line: 0,
        bytes: Vec::new(),
    };
    let Some(form) = lines
        .next_row()?
        .map(|(line, text)| form_of(line, text))
        .transpose()?
    else {
        return Err(ReplayError::Empty);
    };
    let mut builder = TraceBuilder::default();
    let mut size = BlockSize::default();
    match form {
        TraceForm::Mooncake => read_mooncake(&mut lines, &mut builder, &mut size, wanted)?,
        TraceForm::RequestTrace => read_events(&mut lines, &mut builder, &mut size, wanted)?,
    }
    let trace = builder.in_file_order()?;
    let page_tokens = size.decide(page_tokens)?;
    Ok(TraceFile {
        trace,
        form,
        page_tokens,
        misfits: size.misfits(page_tokens),
    })
}

/// The form of the first row decides for the file.
fn form_of(line: u64, text: &[u8]) -> Result<TraceForm, ReplayError> {
    let row: serde_json::Value =
        serde_json::from_slice(text).map_err(|source| ReplayError::NotJson { line, source })?;
    if row.get("hash_ids").is_some() {
        Ok(TraceForm::Mooncake)
    } else if row.get("event").is_some() {
        Ok(TraceForm::RequestTrace)
    } else {
        Err(ReplayError::UnknownForm { line })
    }
}

fn read_mooncake<R: BufRead>(
    lines: &mut Lines<R>,
    builder: &mut TraceBuilder,
    size: &mut BlockSize,
    wanted: &[Signal],
) -> Result<(), ReplayError> {
    let mut row = lines.current();
    while let Some((line, text)) = row {
        let Row {
            arrival_ns,
            input_tokens,
            hash_ids,
            signals,
        } = mooncake::parse(line, text)?;
        size.observe(input_tokens, hash_ids.len());
        builder.push(line, arrival_ns, &hash_ids)?;
        builder.measure(input_tokens);
        builder.say(signals.only(wanted));
        row = lines.next_row()?;
    }
    Ok(())
}

/// A request trace is written as requests end; they are replayed as they arrived.
fn read_events<R: BufRead>(
    lines: &mut Lines<R>,
    builder: &mut TraceBuilder,
    size: &mut BlockSize,
    wanted: &[Signal],
) -> Result<(), ReplayError> {
    let mut ended = Vec::new();
    let mut row = lines.current();
    while let Some((line, text)) = row {
        if let Some(Replayed { row, page_tokens }) = request_trace::parse(line, text)? {
            size.state(line, page_tokens)?;
            size.observe(row.input_tokens, row.hash_ids.len());
            ended.push((line, row));
        }
        row = lines.next_row()?;
    }
    ended.sort_by_key(|(_, row)| row.arrival_ns);
    let first_ns = ended.first().map_or(0, |(_, row)| row.arrival_ns);
    for (line, row) in ended {
        builder.push(line, row.arrival_ns - first_ns, &row.hash_ids)?;
        builder.measure(row.input_tokens);
        builder.say(row.signals.only(wanted));
    }
    Ok(())
}

/// Lines that are not blank, one in memory at a time.
struct Lines<R> {
    source: R,
    line: u64,
    bytes: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    /// The line that [`Self::next_row`] found last.
    fn current(&self) -> Option<(u64, &[u8])> {
        (!self.bytes.is_empty()).then_some((self.line, self.bytes.as_slice()))
    }

    /// The next line with its number, without the bytes that end it.
    fn next_row(&mut self) -> Result<Option<(u64, &[u8])>, ReplayError> {
        loop {
            self.bytes.clear();
            let line = self.line + 1;
            let limit = LINE_BYTES_MAX as u64 + 1;
            let read = Read::take(&mut self.source, limit).read_until(b'\n', &mut self.bytes);
            if read.map_err(|source| ReplayError::Read { line, source })? == 0 {
                return Ok(None);
            }
            self.line = line;
            let text = self.bytes.trim_ascii_end().len();
            if text > LINE_BYTES_MAX {
                return Err(ReplayError::LongLine {
                    line,
                    limit_bytes: LINE_BYTES_MAX,
                });
            }
            self.bytes.truncate(text);
            if !self.bytes.trim_ascii_start().is_empty() {
                return Ok(self.current());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const ROWS: &str = "{\"timestamp\": 0, \"input_length\": 1024, \"hash_ids\": [7, 8]}\n\
                        \n\
                        {\"timestamp\": 3, \"input_length\": 513, \"hash_ids\": [7, 9]}";

    fn failure(text: &str) -> String {
        read(text.as_bytes(), None, &[]).unwrap_err().to_string()
    }

    #[test]
    fn blank_lines_and_a_missing_last_newline_do_no_harm() {
        let file = read(ROWS.as_bytes(), None, &[]).unwrap();
        assert_eq!(
            (file.form, file.page_tokens, file.misfits),
            (TraceForm::Mooncake, 512, 0)
        );
        assert_eq!(
            (file.trace.path(0), file.trace.path(1)),
            (&[0, 1][..], &[0, 2][..])
        );
        assert_eq!(file.trace.arrival_ns(1), 3_000_000);
    }

    #[test]
    fn a_gzip_file_of_several_members_reads_like_the_plain_one() {
        let mut packed = Vec::new();
        for half in ROWS.split_inclusive("\n\n") {
            let mut member =
                flate2::write::GzEncoder::new(&mut packed, flate2::Compression::fast());
            member.write_all(half.as_bytes()).unwrap();
            member.finish().unwrap();
        }
        let path = std::env::temp_dir().join(format!("rootstock-gz-{}", std::process::id()));
        std::fs::write(&path, &packed).unwrap();
        let file = read_file(&path, None, &[], &ProgressBar::hidden());
        std::fs::write(&path, &packed[..packed.len() - 12]).unwrap();
        let cut = read_file(&path, None, &[], &ProgressBar::hidden());
        std::fs::remove_file(&path).unwrap();
        assert_eq!(file.unwrap().trace.len(), 2);
        let cut = cut.unwrap_err().to_string();
        assert!(cut.starts_with("line 3: cannot be read: "), "{cut}");
    }

    #[test]
    fn complaints_name_the_line_and_what_is_wrong() {
        assert_eq!(failure(""), "the trace has no requests");
        assert_eq!(failure("\n \n"), "the trace has no requests");
        let text = failure("\n{\"hash_ids\": [1], ");
        assert!(text.starts_with("line 2: not JSON: "), "{text}");
        let text = failure("{\"a\": 1}");
        assert!(text.starts_with("line 1: neither a Mooncake row"), "{text}");
        let text = failure(&format!("{ROWS}\n{{\"event\": {{}}}}"));
        assert_eq!(
            text,
            "line 4: field hash_ids is absent, expected a list of integers"
        );
    }

    #[test]
    fn a_line_without_end_is_refused_before_it_fills_the_memory() {
        let endless = std::io::repeat(b'[').take(1 << 40);
        let error = read(BufReader::new(endless), None, &[])
            .unwrap_err()
            .to_string();
        assert_eq!(error, "line 1: longer than 16777216 bytes");
    }

    #[test]
    fn deeply_nested_json_is_an_error_not_an_overflow() {
        let text = failure(&"[".repeat(1 << 20));
        assert!(text.starts_with("line 1: not JSON: "), "{text}");
    }
}
