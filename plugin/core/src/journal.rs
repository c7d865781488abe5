//! The journal: every input of the core, written as it happens, replayed bit for bit.
//!
//! The core is a function of its configuration and its inputs, so a recorded run is a test case.
//! [`Journal`] writes each input in front of its effect and, after each `schedule`, a hash of
//! the whole plan and one of all events before it. [`replay`] builds a core from the header, feeds
//! it the inputs and compares the hashes. [`JournalReader`] gives the entries themselves to tools.
//!
//! The caller hands in the sink: the core opens no files. The sink is written on the core's
//! thread in pieces of 64 KiB, so hand in one that does not block for long. Bytes are bounded:
//! at the limit a marker is written and recording stops; serving goes on. A sink that fails stops
//! the recording as well, and `JournalStats` says so.
//!
//! A journal holds prompts and salts: treat it as the conversations themselves.

mod frame;
mod plan_mark;
mod replay;

use std::borrow::Cow;
use std::fmt;
use std::io::{self, Write};

use rootstock_scheduler::{Emit, StepPlan};
use serde::{Deserialize, Serialize};

use crate::config::CoreConfig;
pub use frame::{Entry, JOURNAL_VERSION};
use frame::{Header, MAGIC, append};
pub use plan_mark::{PlanHasher, PlanMark, PlanSummary};
pub use replay::{
    JournalReader, Mismatch, ReplayEnd, ReplayReport, StepSample, replay, replay_with,
};

/// Bytes collected before the sink is written.
const WRITE_BYTES: usize = 64 * 1024;

/// Bytes kept free for the last marker.
const MARKER_BYTES: u64 = 64;

/// Least limit: header and a few entries fit.
const LIMIT_BYTES_MIN: u64 = 64 * 1024;

/// Bounds of a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JournalLimits {
    /// Bytes at most, the last marker included; at least 64 KiB.
    pub max_bytes: u64,
}

impl Default for JournalLimits {
    /// 1 GiB.
    fn default() -> Self {
        Self { max_bytes: 1 << 30 }
    }
}

/// Why a journal cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The first bytes are another file's.
    #[error("not a journal: the first bytes are not its magic")]
    NotAJournal,
    /// Nothing but the magic is there.
    #[error("the journal ends inside its header; nothing was recorded")]
    NoHeader,
    /// Another form of journal.
    #[error("the journal has version {found}, this build reads version {supported}")]
    Version {
        /// Version in the file.
        found: u16,
        /// Version of this build.
        supported: u16,
    },
    /// A frame is damaged.
    #[error("corrupt journal: frame {frame} near byte {offset_bytes}: {what}")]
    Corrupt {
        /// Index of the frame; the header is 0.
        frame: u64,
        /// Where it begins, about.
        offset_bytes: u64,
        /// What does not fit.
        what: &'static str,
    },
    /// The header's configuration builds no core.
    #[error("the journal's configuration is refused: {source}")]
    Config {
        /// What is wrong with it.
        source: crate::config::ConfigError,
    },
    /// The limit leaves no room for anything.
    #[error("a journal of {max_bytes} bytes is too small; at least {min_bytes} are needed")]
    LimitTooSmall {
        /// The limit asked for.
        max_bytes: u64,
        /// The least limit.
        min_bytes: u64,
    },
    /// One input is larger than a frame may be.
    #[error("an entry of {payload_bytes} bytes is above the limit of {limit_bytes}")]
    TooLarge {
        /// Size of the entry.
        payload_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// An entry could not be written in the journal's form.
    #[error("an entry could not be encoded: {source}")]
    Encode {
        /// The encoder's reason.
        source: postcard::Error,
    },
    /// The sink or the source failed.
    #[error("journal {direction} failed: {source}")]
    Io {
        /// "write" or "read".
        direction: &'static str,
        /// The reason.
        source: io::Error,
    },
}

impl JournalError {
    fn read(source: io::Error) -> Self {
        Self::Io {
            direction: "read",
            source,
        }
    }

    fn write(source: io::Error) -> Self {
        Self::Io {
            direction: "write",
            source,
        }
    }
}

/// Where a journal stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum JournalState {
    /// It records.
    Recording,
    /// The byte limit was reached; inputs since then are only counted.
    Full,
    /// The sink failed; inputs since then are only counted.
    Failed(#[serde(skip)] io::ErrorKind),
    /// It was closed.
    Closed,
}

/// What a journal has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct JournalStats {
    /// Bytes, those still collected included.
    pub bytes: u64,
    /// Entries written.
    pub entries: u64,
    /// Entries that came after the end of recording.
    pub dropped: u64,
    /// Where it stands.
    pub state: JournalState,
}

/// Writes the inputs of one core.
pub struct Journal {
    sink: Box<dyn Write + Send>,
    max_bytes: u64,
    collected: Vec<u8>,
    scratch: Vec<u8>,
    hasher: PlanHasher,
    frames: u64,
    stats: JournalStats,
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal")
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

impl Journal {
    /// Begins a journal: writes its header to the sink.
    ///
    /// # Errors
    /// The limit is too small, or the sink failed.
    pub fn new(
        sink: Box<dyn Write + Send>,
        config: &CoreConfig,
        limits: JournalLimits,
    ) -> Result<Self, JournalError> {
        let max_bytes = limits.max_bytes;
        if max_bytes < LIMIT_BYTES_MIN {
            return Err(JournalError::LimitTooSmall {
                max_bytes,
                min_bytes: LIMIT_BYTES_MIN,
            });
        }
        let (mut collected, mut scratch) = (Vec::with_capacity(2 * WRITE_BYTES), Vec::new());
        collected.extend_from_slice(MAGIC);
        collected.extend_from_slice(&JOURNAL_VERSION.to_le_bytes());
        let header = Header {
            written_by: Cow::Borrowed(env!("CARGO_PKG_VERSION")),
            config: Cow::Borrowed(config),
        };
        append(&mut collected, &mut scratch, 0, &header)?;
        let bytes = collected.len() as u64;
        let stats = JournalStats {
            bytes,
            entries: 0,
            dropped: 0,
            state: JournalState::Recording,
        };
        let hasher = PlanHasher::default();
        let mut journal = Self {
            sink,
            max_bytes,
            collected,
            scratch,
            hasher,
            frames: 1,
            stats,
        };
        journal.write_collected().map_err(JournalError::write)?;
        Ok(journal)
    }

    /// Records one entry; when recording has ended, counts it.
    ///
    /// # Cost
    /// Linear in the entry; the sink is written once per 64 KiB.
    pub fn record(&mut self, entry: &Entry<'_>) {
        if self.stats.state != JournalState::Recording {
            self.stats.dropped += 1;
            return;
        }
        let before = self.collected.len();
        let appended = append(&mut self.collected, &mut self.scratch, self.frames, entry);
        let grown = (self.collected.len() - before) as u64;
        if appended.is_err() || self.stats.bytes + grown + MARKER_BYTES > self.max_bytes {
            self.collected.truncate(before);
            self.stats.dropped += 1;
            self.end(&Entry::Full, JournalState::Full);
            return;
        }
        self.count(grown);
        if self.collected.len() >= WRITE_BYTES {
            self.write_or_fail();
        }
    }

    /// Takes in the events of one call; they are part of the next mark.
    pub(crate) fn hear(&mut self, emits: &[Emit]) {
        if self.stats.state == JournalState::Recording {
            self.hasher.hear(emits);
        }
    }

    /// Records the mark of what a `schedule` returned.
    pub(crate) fn record_plan(&mut self, plan: Option<&StepPlan>) {
        if self.stats.state == JournalState::Recording {
            let mark = self.hasher.mark(plan);
            self.record(&Entry::Plan(mark));
        } else {
            self.stats.dropped += 1;
        }
    }

    /// What has been written so far.
    pub fn stats(&self) -> JournalStats {
        self.stats
    }

    /// Hands everything collected to the sink, and flushes it.
    ///
    /// # Errors
    /// The sink failed; recording has ended.
    pub fn flush(&mut self) -> Result<(), JournalError> {
        self.write_collected()
            .and_then(|()| self.sink.flush())
            .map_err(|source| {
                self.stats.state = JournalState::Failed(source.kind());
                JournalError::write(source)
            })
    }

    fn end(&mut self, marker: &Entry<'_>, state: JournalState) {
        let before = self.collected.len();
        if append(&mut self.collected, &mut self.scratch, self.frames, marker).is_ok() {
            self.count((self.collected.len() - before) as u64);
        }
        self.stats.state = state;
        self.write_or_fail();
    }

    fn count(&mut self, grown: u64) {
        self.frames += 1;
        self.stats.entries += 1;
        self.stats.bytes += grown;
    }

    fn write_or_fail(&mut self) {
        if let Err(error) = self.write_collected() {
            self.stats.state = JournalState::Failed(error.kind());
        }
    }

    fn write_collected(&mut self) -> io::Result<()> {
        let written = self.sink.write_all(&self.collected);
        self.collected.clear();
        written
    }
}

impl Drop for Journal {
    /// Writes what was collected and the closing marker. While a panic unwinds the marker is left
    /// out: the reader sees a cut journal whose last entry is the input that led to the panic.
    fn drop(&mut self) {
        if self.stats.state == JournalState::Recording {
            if std::thread::panicking() {
                self.write_or_fail();
            } else {
                self.end(&Entry::Closed, JournalState::Closed);
            }
        }
        if self.sink.flush().is_err() {
            // Nobody is left to tell; the missing marker tells the reader.
            self.stats.state = JournalState::Closed;
        }
    }
}
