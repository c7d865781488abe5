//! Copies between tiers as data, and the trait of what executes them. Who plans a copy holds the
//! destination pages and leases the source until the copy is acknowledged.

use crate::{CopyId, Nanos, PageId, TierId};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Why a copy is made. Engines may order their work by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum CopyClass {
    /// To a slower tier, to keep what pressure would drop.
    Demote,
    /// To a faster tier, because a request waits for it.
    Promote,
    /// To a slower tier, because a pin promised that the bytes stay.
    Pin,
    /// To a slower tier, the pages of a preempted request.
    Preempt,
}

/// One copy: page `from.1[i]` to page `to.1[i]`, for the given layers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CopyPlan {
    /// Unique in one cache; the acknowledgement names it.
    pub id: CopyId,
    /// Source tier and pages.
    pub from: (TierId, Box<[PageId]>),
    /// Destination tier and pages, as many as in `from`.
    pub to: (TierId, Box<[PageId]>),
    /// Layers to copy.
    pub layers: Range<u16>,
    /// Why.
    pub class: CopyClass,
    /// When the copy should have been made, where somebody waits for it.
    pub deadline: Option<Nanos>,
}

/// Acknowledgement of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CopyDone {
    /// Which copy.
    pub id: CopyId,
    /// Whether every byte arrived. When not, nothing at the destination counts.
    pub ok: bool,
}

/// The engine's queue is full; the plan comes back and may be submitted again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

/// Executes copies in the background.
///
/// The caller keeps source bytes unchanged and destination pages unused until the copy is
/// acknowledged. The engine acknowledges each accepted plan exactly once, late or failed if it
/// must be, in any order.
pub trait CopyEngine: Send {
    /// Queues a copy.
    ///
    /// # Errors
    /// Gives the plan back when the queue is full.
    fn submit(&mut self, plan: CopyPlan) -> Result<(), (CopyPlan, Full)>;

    /// Appends the acknowledgements that came in since the last call. Does not wait.
    fn poll(&mut self, done: &mut Vec<CopyDone>);
}
