//! The journal's file form: a magic, a version, then framed entries.
//!
//! ```text
//! "ROOTSTOCK JOURNAL\n"  version: u16 LE   frame 0 = Header   frame 1, 2, .. = Entry
//! frame:  length: u32 LE   check: u32 LE   payload: `length` bytes of postcard
//! ```
//!
//! `check` is the low half of XXH3-64 over the payload, seeded with the frame's index: a flipped
//! bit, a lost frame and a frame from elsewhere are all found. Nothing is trusted when reading: a
//! length above the limit is corruption, not an allocation.

use std::borrow::Cow;
use std::io::Read;

use rootstock_memory::{CopyDone, Nanos, ReplicaId, StepId, StoreEvent};
use rootstock_radix::{Action, NamespaceKey, TenantId};
use rootstock_scheduler::{FinishReason, NewRequest, RequestId, StepOutput};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::JournalError;
use super::plan_mark::PlanMark;
use crate::config::CoreConfig;

/// First bytes of every journal.
pub(super) const MAGIC: &[u8] = b"ROOTSTOCK JOURNAL\n";

/// Version of the form; raised whenever an entry or the configuration changes its form.
pub const JOURNAL_VERSION: u16 = 7;

/// Bytes of a frame's payload at most.
pub(super) const PAYLOAD_BYTES_MAX: usize = 64 << 20;

/// Bytes of a frame before its payload.
pub(super) const FRAME_HEAD_BYTES: usize = 8;

/// First frame: all that is needed to build the same core.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Header<'a> {
    /// Version of the crate that wrote it, for people.
    pub(super) written_by: Cow<'a, str>,
    pub(super) config: Cow<'a, CoreConfig>,
}

/// One entry: an input of the core, in the order in which the core took them, or a mark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
#[expect(
    clippy::large_enum_variant,
    reason = "an entry is written or fed at once, never stored"
)]
pub enum Entry<'a> {
    /// `ServingCore::namespace`.
    Namespace(Cow<'a, NamespaceKey>),
    /// `ServingCore::add`.
    Add(Cow<'a, NewRequest>, Nanos),
    /// `ServingCore::abort`.
    Abort(RequestId, Nanos),
    /// `ServingCore::finish`.
    Finish(RequestId, FinishReason, Nanos),
    /// `ServingCore::schedule`; the next entry is the mark of its plan.
    Schedule(ReplicaId, Nanos),
    /// What `schedule` returned. No input: compared in a replay.
    Plan(PlanMark),
    /// `ServingCore::complete`.
    Complete(ReplicaId, StepId, Cow<'a, StepOutput>, Nanos),
    /// `ServingCore::fail_step`.
    FailStep(ReplicaId, StepId, Nanos),
    /// `ServingCore::copy_done`.
    CopyDone(CopyDone, Nanos),
    /// `ServingCore::store_event`.
    StoreEvent(Cow<'a, StoreEvent>, Nanos),
    /// `ServingCore::attach_storage`.
    AttachStorage(u32, u32),
    /// `ServingCore::detach_storage`.
    DetachStorage,
    /// `ServingCore::tick`.
    Tick(Nanos),
    /// `ServingCore::act`.
    Act(TenantId, Cow<'a, Action>, Nanos),
    /// `ServingCore::flush`.
    Flush(Nanos),
    /// `ServingCore::end_all`.
    EndAll(Nanos),
    /// The byte limit was reached: inputs after this point were not recorded.
    Full,
    /// The journal was closed in order.
    Closed,
}

impl Entry<'_> {
    /// True for what changes the core; marks do not.
    pub fn is_input(&self) -> bool {
        !matches!(self, Self::Plan(_) | Self::Full | Self::Closed)
    }
}

/// Appends one frame to `out`, through the reused `scratch`.
pub(super) fn append<T: Serialize>(
    out: &mut Vec<u8>,
    scratch: &mut Vec<u8>,
    index: u64,
    value: &T,
) -> Result<(), JournalError> {
    scratch.clear();
    let payload = postcard::to_extend(value, std::mem::take(scratch))
        .map_err(|source| JournalError::Encode { source })?;
    let length = u32::try_from(payload.len())
        .ok()
        .filter(|_| payload.len() <= PAYLOAD_BYTES_MAX);
    let length = length.ok_or(JournalError::TooLarge {
        payload_bytes: payload.len() as u64,
        limit_bytes: PAYLOAD_BYTES_MAX as u64,
    })?;
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&check_of(&payload, index).to_le_bytes());
    out.extend_from_slice(&payload);
    *scratch = payload;
    Ok(())
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is the check")]
fn check_of(payload: &[u8], index: u64) -> u32 {
    xxh3_64_with_seed(payload, index) as u32
}

/// What a frame reader found.
pub(super) enum Frame<'b> {
    /// A payload whose check fits.
    Payload(&'b [u8]),
    /// The bytes end between two frames.
    End,
    /// The bytes end inside a frame.
    Torn,
}

/// Reads frames one after the other, with one reused buffer.
#[derive(Debug)]
pub(super) struct FrameReader<R> {
    source: R,
    payload: Vec<u8>,
    index: u64,
    offset: u64,
}

impl<R: Read> FrameReader<R> {
    /// Reads magic and version.
    pub(super) fn open(mut source: R) -> Result<Self, JournalError> {
        let mut head = [0; MAGIC.len() + 2];
        let read = read_up_to(&mut source, &mut head)?;
        let (magic, version) = head.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(JournalError::NotAJournal);
        }
        if read < head.len() {
            return Err(JournalError::NoHeader);
        }
        let found = version
            .iter()
            .rev()
            .fold(0, |word, byte| word << 8 | u16::from(*byte));
        if found != JOURNAL_VERSION {
            return Err(JournalError::Version {
                found,
                supported: JOURNAL_VERSION,
            });
        }
        Ok(Self {
            source,
            payload: Vec::new(),
            index: 0,
            offset: head.len() as u64,
        })
    }

    /// Index of the frame that `next` returns next.
    pub(super) fn index(&self) -> u64 {
        self.index
    }

    /// Offset in bytes of the frame that `next` returns next.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The corruption at the frame last returned.
    pub(super) fn corrupt(&self, what: &'static str) -> JournalError {
        let frame = self.index.saturating_sub(1);
        JournalError::Corrupt {
            frame,
            offset_bytes: self.offset,
            what,
        }
    }

    /// The next frame's payload.
    pub(super) fn next(&mut self) -> Result<Frame<'_>, JournalError> {
        let mut head = [0; FRAME_HEAD_BYTES];
        match read_up_to(&mut self.source, &mut head)? {
            0 => return Ok(Frame::End),
            FRAME_HEAD_BYTES => {}
            _ => return Ok(Frame::Torn),
        }
        let word = |at: usize| {
            head[at..at + 4]
                .iter()
                .rev()
                .fold(0, |w, b| w << 8 | u32::from(*b))
        };
        let (length, check) = (word(0), word(4));
        let index = self.index;
        self.index += 1;
        if length as usize > PAYLOAD_BYTES_MAX {
            return Err(self.corrupt("a length above the limit"));
        }
        // Grows only with bytes that are really there, whatever the length says.
        self.payload.clear();
        let mut limited = (&mut self.source).take(u64::from(length));
        let read = limited
            .read_to_end(&mut self.payload)
            .map_err(JournalError::read)?;
        if read < length as usize {
            return Ok(Frame::Torn);
        }
        if check_of(&self.payload, index) != check {
            return Err(self.corrupt("the check does not fit"));
        }
        self.offset += FRAME_HEAD_BYTES as u64 + u64::from(length);
        Ok(Frame::Payload(&self.payload))
    }
}

/// Fills the buffer as far as the source has bytes.
fn read_up_to(source: &mut impl Read, buffer: &mut [u8]) -> Result<usize, JournalError> {
    let mut filled = 0;
    while filled < buffer.len() {
        match source.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(JournalError::read(error)),
        }
    }
    Ok(filled)
}
