//! W2: a trace of block hashes as a workload. A hash id becomes `BLOCK_TOKENS` tokens of its own
//! stream, the last block of a prompt cut to its length; outputs are unique tokens at 25 ms each.
//! Own.

use std::io::{self, BufRead};

use serde::Deserialize;

use crate::workload::{Request, Span, Workload};

const BLOCK_TOKENS: u32 = 512;
const OUTPUT_MS: f64 = 25.0;

#[derive(Deserialize)]
struct Row {
    #[serde(default)]
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// Reads Mooncake rows as a workload.
///
/// # Errors
/// The reader's, or a line that is no row.
pub fn workload(rows: impl BufRead) -> io::Result<Workload> {
    let (mut requests, mut times_s) = (Vec::new(), Vec::new());
    for (line, number) in rows.lines().zip(0_u64..) {
        let row: Row = serde_json::from_str(&line?).map_err(io::Error::other)?;
        let (mut left, mut spans) = (row.input_length, Vec::new());
        for id in row.hash_ids {
            let len = left.min(BLOCK_TOKENS);
            if len == 0 {
                break;
            }
            spans.push(Span {
                stream: (1 << 32) + id,
                start: 0,
                len,
            });
            left -= len;
        }
        let output = row.output_length.max(1);
        spans.push(Span {
            stream: (1 << 40) + number,
            start: 0,
            len: output,
        });
        requests.push(Request::new(spans, output));
        let begin_s = row.timestamp / 1000.0;
        times_s.push((
            begin_s,
            begin_s + 0.001 + f64::from(output) * OUTPUT_MS / 1000.0,
        ));
    }
    Ok(Workload::timed(requests, &times_s))
}
