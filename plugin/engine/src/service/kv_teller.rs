//! Tells a sink what becomes cached and what goes, once a turn of the core thread.
//!
//! The log of the cache is bounded. Where events were lost in it, or somebody asks for it, the
//! sink gets all that is cached instead of what changed, so that it never has to guess.

use rootstock::ServingCore;
use rootstock::radix::KvEvent;

use super::config::{KvEventSink, KvNews};

/// The sink and what it is owed.
#[derive(Debug)]
pub(super) struct KvTeller {
    sink: KvEventSink,
    events: Vec<KvEvent>,
    owes_snapshot: bool,
}

impl KvTeller {
    /// A sink that has heard nothing, of a cache that is empty.
    pub(super) fn new(sink: KvEventSink) -> Self {
        Self {
            sink,
            events: Vec::new(),
            owes_snapshot: false,
        }
    }

    /// The next news are all that is cached.
    pub(super) fn want_snapshot(&mut self) {
        self.owes_snapshot = true;
    }

    /// Passes on what is new.
    pub(super) fn tell(&mut self, core: &mut ServingCore) {
        self.events.clear();
        core.drain_events(&mut self.events);
        let is_gap = |event: &KvEvent| matches!(event, KvEvent::Gap { .. });
        if self.owes_snapshot || self.events.iter().any(is_gap) {
            self.owes_snapshot = false;
            self.events.clear();
            core.dump_events(&mut self.events);
            (self.sink.take)(KvNews::Snapshot(&self.events), core);
        } else if !self.events.is_empty() {
            (self.sink.take)(KvNews::Changed(&self.events), core);
        }
    }
}
