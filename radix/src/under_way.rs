//! What whoever embeds the cache asks about copies: which to start, and what they still keep.
//!
//! Each copy has a device end, and the engine of that device's replica executes it. So copies are
//! fetched by replica. The questions are cheap when no copy is under way.

use crate::Lease;
use crate::cache::PrefixCache;
use crate::copies::{Flight, Flights};
use rootstock_memory::{CopyId, CopyPlan, Nanos, ReplicaId, StepId, TierId};

impl Flights {
    /// Copies that are not acknowledged.
    pub(crate) fn under_way(&self) -> usize {
        let all = self.all.values();
        all.filter(|flight| flight.is_under_way()).count()
    }
}

impl PrefixCache {
    /// Counts the pages that a copy brought.
    pub(crate) fn count_arrival(&mut self, flight: &Flight, ok: bool) {
        let (down, up) = &mut self.flights.arrived;
        let to_host = Some(flight.to) == self.host;
        let counter = if to_host { down } else { up };
        *counter += if ok {
            u64::from(flight.end - flight.start)
        } else {
            0
        };
    }

    /// Appends the copies of a replica's device that were planned since the last call.
    pub fn drain_copies_of(&mut self, replica: ReplicaId, out: &mut Vec<CopyPlan>) {
        out.append(&mut self.take_copies_of(TierId::Device(replica)));
    }

    /// Copies that nobody has fetched yet, from or to a tier.
    pub(crate) fn take_copies_of(&mut self, tier: TierId) -> Vec<CopyPlan> {
        if self.flights.outbox.is_empty() {
            return Vec::new();
        }
        let ours = |plan: &mut CopyPlan| plan.from.0 == tier || plan.to.0 == tier;
        self.flights.outbox.extract_if(.., ours).collect()
    }

    /// Copies under way from or to a tier. While there are any, what is missing in that tier may
    /// still come back: wait for their acknowledgements.
    pub fn copies_at(&self, tier: TierId) -> u32 {
        let Some(at) = self.index(tier) else { return 0 };
        let flights = self.flights.all.values();
        let ours = |flight: &&crate::copies::Flight| flight.from == at || flight.to == at;
        crate::tree::narrow(flights.filter(|f| f.is_under_way()).filter(ours).count())
    }

    /// Pages of a tier that only copies under way keep: with their acknowledgements they are
    /// available. The same as `in_transit_pages` of [`crate::Short`].
    pub fn returning(&self, tier: TierId) -> u32 {
        match self.index(tier) {
            Some(at) if !self.flights.all.is_empty() => self.kept_by_copies(at),
            Some(_) | None => 0,
        }
    }

    /// Whether the copy that [`PrefixCache::promote`] planned for a lease is under way. Afterwards
    /// [`PrefixCache::grow`] tells what it brought: nothing, if it failed.
    pub fn is_promoting(&self, lease: &Lease) -> bool {
        let flight = lease.copy.and_then(|id| self.flights.all.get(&id));
        flight.is_some_and(crate::copies::Flight::is_under_way)
    }

    /// Step `step` reads the destination of the copy that [`PrefixCache::promote`] planned for a
    /// lease, each layer once it has arrived: where the copy fails, or brings what is there
    /// already, its pages are free after that step only. `None` when it is not under way.
    pub fn stand_on(&mut self, lease: &Lease, step: StepId) -> Option<CopyId> {
        let id = lease.copy?;
        let flight = self.flights.all.get_mut(&id)?;
        if !flight.is_under_way() {
            return None;
        }
        flight.read_by = flight.read_by.max(Some(step));
        Some(id)
    }

    /// Whether that copy has brought all it should, and the lease has not been grown over it yet.
    pub fn has_arrived(&self, lease: &Lease) -> bool {
        let flight = lease.copy.and_then(|id| self.flights.all.get(&id));
        flight.is_some_and(|flight| !flight.is_under_way())
    }

    /// Whether what a match found on host right after a lease is on its way to the device by a
    /// copy that another lease asked for: wait for it instead of computing it or copying it twice.
    pub fn is_coming(&self, lease: &Lease) -> bool {
        let Some((node, generation, pages)) = lease.ahead else {
            return false;
        };
        let alive = self.tree.nodes.get(node as usize);
        if alive.is_none_or(|node| node.generation != generation) {
            return false;
        }
        let first = self
            .nodes_between(node, lease.pages, pages)
            .first()
            .copied();
        first.is_some_and(|at| self.tiers[usize::from(lease.replica.0)].span(at).incoming)
    }

    /// When the next thing happens by time alone: a pin expires. None: nothing will.
    pub fn due_at(&self) -> Option<Nanos> {
        self.pins.due.first().map(|&(at, _, _)| at)
    }
}
