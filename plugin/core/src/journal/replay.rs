//! Feeding a journal to a new core and comparing each plan, and the events before it, with the
//! recorded ones.
//!
//! A journal comes from outside: torn, damaged, of another version or made up, it ends in an error
//! value or in a report, never in a panic. Memory follows the bytes that are really there and the
//! pool sizes that the header names.

use std::collections::BTreeMap;
use std::io::Read;

use rootstock_memory::{Nanos, ReplicaId, StepId};
use rootstock_scheduler::{StepLoad, StepPlan};
use serde::Serialize;

use super::frame::{Entry, Frame, FrameReader, Header};
use super::plan_mark::{PlanHasher, PlanMark};
use super::{JOURNAL_VERSION, JournalError};
use crate::config::CoreConfig;
use crate::serving::ServingCore;

/// How a journal ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum ReplayEnd {
    /// Closed in order.
    Closed,
    /// The byte limit was reached; the run went on unrecorded.
    Full,
    /// The bytes end between two entries: the writer was stopped from outside.
    Cut,
    /// The bytes end inside an entry: the writer was stopped from outside. Everything before is
    /// good.
    Torn {
        /// Where the unfinished entry begins.
        offset_bytes: u64,
    },
}

/// The first plan that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mismatch {
    /// Inputs fed before, the `schedule` itself included.
    pub input: u64,
    /// The plan of the recorded run.
    pub recorded: PlanMark,
    /// The plan of the replay.
    pub replayed: PlanMark,
}

/// A step of the recorded run: what it computed and how long it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepSample {
    /// What it computed.
    pub load: StepLoad,
    /// From its launch, or the end of the step before it, to its result.
    pub ns: Nanos,
}

/// What a replay found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReplayReport {
    /// Version of the crate that wrote the journal.
    pub written_by: String,
    /// Inputs fed.
    pub inputs: u64,
    /// Plans compared, absent ones included.
    pub plans: u64,
    /// Plans that were not equal.
    pub mismatches: u64,
    /// The first of them.
    pub first_mismatch: Option<Mismatch>,
    /// Events that came out.
    pub emits: u64,
    /// The steps that computed something and succeeded, in the order of their ends.
    pub steps: Vec<StepSample>,
    /// How the journal ended.
    pub end: ReplayEnd,
}

impl ReplayReport {
    /// True when every plan was equal.
    pub fn is_exact(&self) -> bool {
        self.mismatches == 0
    }
}

/// Reads a journal entry by entry.
#[derive(Debug)]
pub struct JournalReader<R> {
    frames: FrameReader<R>,
    config: CoreConfig,
    written_by: String,
}

impl<R: Read> JournalReader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// Not a journal, another version, or damaged.
    pub fn open(source: R) -> Result<Self, JournalError> {
        let mut frames = FrameReader::open(source)?;
        let header = match frames.next()? {
            Frame::Payload(payload) => decode::<Header<'static>>(payload),
            Frame::End | Frame::Torn => return Err(JournalError::NoHeader),
        };
        let header = header.ok_or_else(|| frames.corrupt("no configuration"))?;
        let (config, written_by) = (header.config.into_owned(), header.written_by.into_owned());
        Ok(Self {
            frames,
            config,
            written_by,
        })
    }

    /// Version of the form, always [`JOURNAL_VERSION`].
    pub fn version(&self) -> u16 {
        JOURNAL_VERSION
    }

    /// Configuration of the recorded core.
    pub fn config(&self) -> &CoreConfig {
        &self.config
    }

    /// The next entry, or how the journal ended. After an end the same end comes again.
    ///
    /// # Errors
    /// The journal is damaged here, or the source failed.
    pub fn next_entry(&mut self) -> Result<Result<Entry<'static>, ReplayEnd>, JournalError> {
        let offset_bytes = self.frames.offset();
        let entry = match self.frames.next()? {
            Frame::End => return Ok(Err(ReplayEnd::Cut)),
            Frame::Torn => return Ok(Err(ReplayEnd::Torn { offset_bytes })),
            Frame::Payload(payload) => decode::<Entry<'static>>(payload),
        };
        match entry {
            Some(Entry::Closed) => Ok(Err(ReplayEnd::Closed)),
            Some(Entry::Full) => Ok(Err(ReplayEnd::Full)),
            Some(entry) => Ok(Ok(entry)),
            None => Err(self.frames.corrupt("no entry of this version")),
        }
    }

    /// Index of the next frame.
    pub fn frame(&self) -> u64 {
        self.frames.index()
    }
}

/// Replays a journal from its first byte to its end.
///
/// # Errors
/// Not a journal, another version, damaged, or a configuration that builds no core.
///
/// # Cost
/// The time of the recorded core work; no backend runs.
pub fn replay(source: impl Read) -> Result<ReplayReport, JournalError> {
    replay_with(source, |_| ())
}

/// As [`replay`], and shows each plan to `see` before its outcome is fed.
///
/// # Errors
/// As [`replay`].
pub fn replay_with(
    source: impl Read,
    mut see: impl FnMut(&StepPlan),
) -> Result<ReplayReport, JournalError> {
    let mut reader = JournalReader::open(source)?;
    let mut core = ServingCore::new(reader.config().clone())
        .map_err(|source| JournalError::Config { source })?;
    let mut player = Player::default();
    let end = loop {
        match reader.next_entry()? {
            Ok(entry) => player.play(&mut core, entry, &reader, &mut see)?,
            Err(end) => break end,
        }
    };
    Ok(ReplayReport {
        written_by: reader.written_by,
        inputs: player.inputs,
        plans: player.plans,
        mismatches: player.mismatches,
        first_mismatch: player.first_mismatch,
        emits: player.emits,
        steps: player.clock.samples,
        end,
    })
}

#[derive(Default)]
struct Player {
    hasher: PlanHasher,
    /// Mark of the plan made last, until it has been compared.
    made: Option<PlanMark>,
    inputs: u64,
    plans: u64,
    mismatches: u64,
    first_mismatch: Option<Mismatch>,
    emits: u64,
    drained: Vec<rootstock_scheduler::Emit>,
    clock: StepClock,
}

/// Times the steps of the recorded run.
#[derive(Default)]
struct StepClock {
    flying: BTreeMap<(ReplicaId, StepId), (StepLoad, Nanos)>,
    landed_at: BTreeMap<ReplicaId, Nanos>,
    samples: Vec<StepSample>,
}

impl StepClock {
    fn launched(&mut self, replica: ReplicaId, plan: &StepPlan, now: Nanos) {
        if plan.overtakes {
            // The time of the one it interrupts says nothing.
            self.flying.retain(|(of, _), _| *of != replica);
        }
        if !plan.rows.is_empty() {
            self.flying.insert((replica, plan.id), (plan.load(), now));
        }
    }

    fn landed(&mut self, replica: ReplicaId, step: StepId, now: Nanos) {
        let before = self.landed_at.insert(replica, now).unwrap_or(0);
        if let Some((load, launched)) = self.flying.remove(&(replica, step)) {
            let ns = now.saturating_sub(launched.max(before));
            self.samples.push(StepSample { load, ns });
        }
    }
}

impl Player {
    fn play<R: Read>(
        &mut self,
        core: &mut ServingCore,
        entry: Entry<'static>,
        reader: &JournalReader<R>,
        see: &mut impl FnMut(&StepPlan),
    ) -> Result<(), JournalError> {
        if let Entry::Plan(recorded) = entry {
            let Some(replayed) = self.made.take() else {
                return Err(reader.frames.corrupt("a plan without a schedule"));
            };
            self.compare(recorded, replayed);
            return Ok(());
        }
        self.inputs += 1;
        self.made = None;
        match entry {
            // Answers are functions of the inputs: only plans are compared.
            Entry::Namespace(key) => drop(core.namespace(&key)),
            Entry::Add(request, now) => drop(core.add(request.into_owned(), now)),
            Entry::Abort(request, now) => _ = core.abort(request, now),
            Entry::Finish(request, reason, now) => _ = core.finish(request, reason, now),
            Entry::Schedule(replica, now) => {
                let plan = core.schedule(replica, now);
                self.hear(core);
                self.made = Some(self.hasher.mark(plan.as_ref()));
                if let Some(plan) = plan {
                    see(&plan);
                    self.clock.launched(replica, &plan, now);
                }
            }
            Entry::Complete(replica, step, output, now) => {
                self.clock.landed(replica, step, now);
                core.complete(replica, step, &output, now);
            }
            Entry::FailStep(replica, step, now) => core.fail_step(replica, step, now),
            Entry::CopyDone(done, now) => core.copy_done(done, now),
            Entry::StoreEvent(event, now) => core.store_event(event.into_owned(), now),
            Entry::AttachStorage(limit, probes) => {
                core.attach_storage(limit, probes);
            }
            Entry::DetachStorage => core.detach_storage(),
            Entry::Tick(now) => core.tick(now),
            Entry::Act(tenant, action, now) => drop(core.act(tenant, &action, now)),
            Entry::Flush(now) => drop(core.flush(now)),
            Entry::EndAll(now) => core.end_all(now),
            Entry::Plan(_) | Entry::Full | Entry::Closed => {}
        }
        self.hear(core);
        Ok(())
    }

    fn hear(&mut self, core: &mut ServingCore) {
        core.drain_emits(&mut self.drained);
        self.hasher.hear(&self.drained);
        self.emits += self.drained.len() as u64;
        self.drained.clear();
    }

    fn compare(&mut self, recorded: PlanMark, replayed: PlanMark) {
        self.plans += 1;
        if recorded == replayed {
            return;
        }
        self.mismatches += 1;
        if self.first_mismatch.is_none() {
            self.first_mismatch = Some(Mismatch {
                input: self.inputs,
                recorded,
                replayed,
            });
        }
    }
}

/// A value that fills the payload exactly.
fn decode<T: for<'de> serde::Deserialize<'de>>(payload: &[u8]) -> Option<T> {
    let (value, rest) = postcard::take_from_bytes(payload).ok()?;
    rest.is_empty().then_some(value)
}
