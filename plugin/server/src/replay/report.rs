//! What a replay found, as a table for people and as JSON for programs.

use std::fmt::Write;

use rootstock::radix::HitCurve;
use serde::Serialize;

use super::columns::Swept;
use super::read::TraceForm;
use super::tally::Times;

/// The line of the offline optimum.
pub(crate) const OPTIMUM: &str = "optimum";

/// The line of the cache without limit.
pub(crate) const INFINITE: &str = "infinite";

/// All figures of one `rootstock replay`.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Name of the trace file, without its folder.
    pub trace: String,
    /// Form of its rows.
    pub form: TraceForm,
    /// Requests.
    pub requests: u64,
    /// Tokens of a block.
    pub page_tokens: u32,
    /// The tier whose size differs from column to column.
    pub swept: Swept,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Blocks of all prompts, a partial last one counted as one.
    pub blocks: u64,
    /// Different blocks.
    pub distinct_blocks: u32,
    /// Hash ids that stand after more than one prefix; each is a block of its own.
    pub split_ids: u32,
    /// Rows whose count of ids does not fit their `input_length`.
    pub misfit_rows: u64,
    /// One entry for each line of the table and capacity, line by line.
    pub results: Vec<Entry>,
}

/// Hits of one policy at one capacity.
#[derive(Debug, Serialize)]
pub struct Entry {
    /// Policy, or `optimum`, or `infinite`.
    pub policy: &'static str,
    /// Capacity as asked for.
    pub capacity_tokens: u64,
    /// Capacity in whole blocks.
    pub capacity_blocks: u32,
    /// Tokens of the host tier below it.
    #[serde(skip_serializing_if = "is_none")]
    pub host_tokens: u64,
    /// Tokens of the storage tier below that.
    #[serde(skip_serializing_if = "is_none")]
    pub storage_tokens: u64,
    /// Blocks found, on all tiers.
    pub hit_blocks: u64,
    /// Those copied up from host.
    #[serde(skip_serializing_if = "is_none")]
    pub host_hit_blocks: u64,
    /// Those read from storage.
    #[serde(skip_serializing_if = "is_none")]
    pub storage_hit_blocks: u64,
    /// Blocks found, of all blocks.
    pub hit_ratio: f64,
    /// Hits compared with those of `lru` at the same capacity; absent where that has none.
    pub times_lru: Option<f64>,
    /// Hits compared with those of the optimum at the same capacity; absent where that has none.
    pub share_of_optimum: Option<f64>,
    /// Tokens of prompts that were not computed, partial blocks counted as they are; absent where
    /// the figure is not replayed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_tokens: Option<u64>,
    /// How long prompts would take, where step times are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub times: Option<Times>,
    /// Seconds that the replay took; absent where the figure is not replayed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Hit ratios that the cache expected of other capacities while it ran at this one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub expected: Vec<Expected>,
}

/// What a cache expects of another capacity.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Expected {
    /// Capacity of all tiers together.
    pub capacity_blocks: u64,
    /// Hits of its policy, of all blocks.
    pub hit_ratio: f64,
    /// Hits of `lru`, of all blocks.
    pub lru_hit_ratio: f64,
}

impl Expected {
    /// The points of a curve whose blocks are pages of one token.
    pub(crate) fn all_of(curve: &HitCurve) -> Vec<Self> {
        let of_all = |hits| ratio(hits, curve.lookup_tokens).unwrap_or_default();
        let points = curve.points.iter().map(|point| Self {
            capacity_blocks: point.pages,
            hit_ratio: of_all(point.hit_tokens),
            lru_hit_ratio: of_all(point.lru_hit_tokens),
        });
        points.collect()
    }
}

impl Entry {
    /// Tokens of the tier that is swept.
    pub(crate) const fn swept_tokens(&self, swept: Swept) -> u64 {
        match swept {
            Swept::Device => self.capacity_tokens,
            Swept::Host => self.host_tokens,
            Swept::Storage => self.storage_tokens,
        }
    }
}

/// Whether there is no such tier.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_none(tokens: &u64) -> bool {
    *tokens == 0
}

impl Report {
    /// The table: a line for each policy, a column for each capacity.
    pub fn table(&self) -> String {
        let mut text = format!(
            "{}: {} requests, {} blocks of {} tokens, {} distinct\n",
            self.trace, self.requests, self.blocks, self.page_tokens, self.distinct_blocks
        );
        for note in self.notes() {
            text.push_str(&note);
        }
        push(
            &mut text,
            format_args!("hit ratio in blocks, by {}", self.axis()),
        );
        text.push_str("\n\n");
        self.grid(&mut text, |entry| Some(format!("{:.4}", entry.hit_ratio)));
        text
    }

    /// What the columns are, and the tiers that are the same in all.
    pub(crate) fn axis(&self) -> String {
        let (device, host, storage) = self.results.first().map_or((0, 0, 0), |entry| {
            let Entry {
                capacity_tokens, ..
            } = *entry;
            (capacity_tokens, entry.host_tokens, entry.storage_tokens)
        });
        let mut text = match self.swept {
            Swept::Device => "capacity in tokens".to_owned(),
            Swept::Host => format!("tokens of a host tier below a device of {device}"),
            Swept::Storage => {
                format!(
                    "tokens of a storage tier below a device of {device} and a host tier of {host}"
                )
            }
        };
        if host > 0 && self.swept == Swept::Device {
            push(&mut text, format_args!(" above a host tier of {host}"));
        }
        if storage > 0 && self.swept != Swept::Storage {
            push(&mut text, format_args!(" and a storage tier of {storage}"));
        }
        text
    }

    /// Tokens of prefill saved, in thousands, in the order of the table.
    pub fn savings(&self) -> String {
        let mut text = format!(
            "\nthousand tokens of prefill saved, of {}\n\n",
            self.prompt_tokens / 1000
        );
        self.grid(&mut text, |entry| {
            Some((entry.saved_tokens? / 1000).to_string())
        });
        text
    }

    /// Times to the first token; empty without step times.
    pub fn times(&self) -> String {
        let mut text = String::new();
        if self.results.iter().all(|entry| entry.times.is_none()) {
            return text;
        }
        let figures = [
            ("prefill alone, p50", 0),
            ("prefill alone, p95", 1),
            ("first token, one prompt at a time, p50", 2),
            ("first token, one prompt at a time, p95", 3),
        ];
        for (what, figure) in figures {
            push(&mut text, format_args!("\nseconds: {what}\n\n"));
            self.grid(&mut text, |entry| {
                let times = entry.times?;
                let all = [
                    times.prefill_p50_s,
                    times.prefill_p95_s,
                    times.ttft_p50_s,
                    times.ttft_p95_s,
                ];
                Some(format!("{:.3}", all.get(figure)?))
            });
        }
        text
    }

    /// A line for each policy that has figures, a column for each capacity.
    fn grid(&self, text: &mut String, cell: impl Fn(&Entry) -> Option<String>) {
        let lines: Vec<&[Entry]> = self
            .results
            .chunk_by(|one, next| one.policy == next.policy)
            .collect();
        let names = lines
            .iter()
            .filter_map(|line| line.first())
            .map(|entry| entry.policy.len());
        let name_width = names.max().unwrap_or(0);
        let capacities: Vec<String> = lines
            .first()
            .map(|line| {
                line.iter()
                    .map(|entry| entry.swept_tokens(self.swept).to_string())
                    .collect()
            })
            .unwrap_or_default();
        let widths: Vec<usize> = capacities
            .iter()
            .map(|text| text.len().max(6) + 2)
            .collect();
        text.push_str(&" ".repeat(name_width));
        for (capacity, width) in capacities.iter().zip(&widths) {
            push(text, format_args!("{capacity:>width$}"));
        }
        text.push('\n');
        for line in lines {
            let cells: Vec<String> = line.iter().filter_map(&cell).collect();
            if cells.is_empty() {
                continue;
            }
            let name = line.first().map_or("", |entry| entry.policy);
            push(text, format_args!("{name:<name_width$}"));
            for (figure, width) in cells.iter().zip(&widths) {
                push(text, format_args!("{figure:>width$}"));
            }
            text.push('\n');
        }
    }

    /// The curves that caches expected while they ran: a line for each capacity they ran at, in
    /// which the middle figure is their own; empty where no policy makes one.
    pub fn expectations(&self) -> String {
        let mut text = String::new();
        for entry in self
            .results
            .iter()
            .filter(|entry| !entry.expected.is_empty())
        {
            if text.is_empty() {
                text.push_str("\nexpected by a cache that runs at one capacity, of others\n");
            }
            push(
                &mut text,
                format_args!("{} at {}:", entry.policy, entry.swept_tokens(self.swept)),
            );
            for point in &entry.expected {
                let tokens = point.capacity_blocks * u64::from(self.page_tokens);
                push(&mut text, format_args!("  {tokens} {:.4}", point.hit_ratio));
            }
            text.push('\n');
        }
        text
    }

    /// How fast the replays ran, for one processor; empty where nothing was measured.
    pub fn closing(&self) -> String {
        let times = || self.results.iter().filter_map(|entry| entry.seconds);
        let (replays, seconds) = (times().count(), times().sum::<f64>());
        if seconds <= 0.0 {
            return String::new();
        }
        #[expect(
            clippy::cast_precision_loss,
            reason = "counts of requests stay below 2^53"
        )]
        let per_second = self.requests as f64 * replays as f64 / seconds;
        format!(
            "\n{replays} replays in {seconds:.2} s of a processor: {per_second:.0} requests/s\n"
        )
    }

    /// What the reader of the figures has to know about the file.
    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.misfit_rows > 0 {
            notes.push(format!(
                "note: {} rows have more or fewer hash ids than blocks of {} tokens\n",
                self.misfit_rows, self.page_tokens
            ));
        }
        if self.split_ids > 0 {
            notes.push(format!(
                "note: {} hash ids stand after more than one prefix, each counted as a block of \
                 its own\n",
                self.split_ids
            ));
        }
        notes
    }
}

/// Writing to a string does not fail.
fn push(text: &mut String, args: std::fmt::Arguments<'_>) {
    text.write_fmt(args).unwrap_or_default();
}

/// `part / whole`, absent for nothing.
pub(crate) fn ratio(part: u64, whole: u64) -> Option<f64> {
    #[expect(
        clippy::cast_precision_loss,
        reason = "counts of blocks stay far below 2^53"
    )]
    let ratio = part as f64 / whole as f64;
    (whole > 0).then_some(ratio)
}
