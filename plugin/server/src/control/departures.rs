//! What left the cache lately and why, for people who look at it: a short list, the oldest goes.
//!
//! It hears the events of the cache. A page that leaves a device while host keeps it has only
//! moved down; for that the pages on host are remembered by their hashes. What goes in one second
//! for one reason is one entry.

use std::collections::{BTreeSet, VecDeque};

use rootstock::memory::Nanos;
use rootstock::radix::{EventTier, KvEvent};

/// Entries that are kept.
pub const DEPARTURES_MAX: usize = 128;
/// What goes within this time for the same reason is one entry.
const TOGETHER: Nanos = 1_000_000_000;

/// Why pages went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Others needed the room.
    Room,
    /// Their request had ended as ephemeral.
    Ephemeral,
    /// The tier was emptied.
    Flush,
}

impl Reason {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Reason::Room => "room",
            Reason::Ephemeral => "ephemeral",
            Reason::Flush => "flush",
        }
    }
}

/// Pages that went together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    /// When the last of them went.
    pub at: Nanos,
    /// From where.
    pub tier: EventTier,
    /// Why.
    pub reason: Reason,
    /// How many; unknown for a flush.
    pub pages: u64,
    /// Of those, such as the host tier still has.
    pub moved_down: u64,
}

/// The list.
#[derive(Debug, Default)]
pub struct Departures {
    on_host: BTreeSet<u64>,
    list: VecDeque<Departure>,
    /// Pages that left devices while host kept them.
    moved_down: u64,
}

impl Departures {
    /// Hears an event. `ephemeral`: what is removed was dropped with its request.
    pub fn hear(&mut self, event: &KvEvent, ephemeral: bool, now: Nanos) {
        match event {
            KvEvent::Stored {
                tier: EventTier::Host,
                pages,
                ..
            } => self
                .on_host
                .extend(pages.iter().map(|page| page.sequence_hash)),
            KvEvent::Stored { .. } => {}
            KvEvent::Removed { tier, hashes } => {
                let moved_down = match tier {
                    EventTier::Host => {
                        for hash in hashes {
                            self.on_host.remove(hash);
                        }
                        0
                    }
                    EventTier::Device(_) => {
                        let kept = hashes.iter().filter(|hash| self.on_host.contains(hash));
                        kept.count() as u64
                    }
                };
                self.moved_down += moved_down;
                self.note(Departure {
                    at: now,
                    tier: *tier,
                    reason: if ephemeral {
                        Reason::Ephemeral
                    } else {
                        Reason::Room
                    },
                    pages: hashes.len() as u64,
                    moved_down,
                });
            }
            KvEvent::Cleared { tier } => {
                if *tier == EventTier::Host {
                    self.on_host.clear();
                }
                self.note(Departure {
                    at: now,
                    tier: *tier,
                    reason: Reason::Flush,
                    pages: 0,
                    moved_down: 0,
                });
            }
            // What is on host is no longer known for sure.
            KvEvent::Gap { .. } => self.on_host.clear(),
            _ => {}
        }
    }

    fn note(&mut self, one: Departure) {
        if let Some(last) = self.list.back_mut()
            && (last.tier, last.reason) == (one.tier, one.reason)
            && one.at.saturating_sub(last.at) < TOGETHER
        {
            last.at = one.at;
            last.pages += one.pages;
            last.moved_down += one.moved_down;
            return;
        }
        if self.list.len() == DEPARTURES_MAX {
            self.list.pop_front();
        }
        self.list.push_back(one);
    }

    /// The newest first.
    pub fn list(&self) -> impl Iterator<Item = &Departure> {
        self.list.iter().rev()
    }

    /// Counter: pages that left devices while host kept them.
    pub fn moved_down(&self) -> u64 {
        self.moved_down
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rootstock::memory::ReplicaId;
    use rootstock::radix::StoredPage;

    const DEVICE: EventTier = EventTier::Device(ReplicaId(0));
    const SECOND: Nanos = 1_000_000_000;

    fn stored(tier: EventTier, hashes: &[u64]) -> KvEvent {
        let page = |&hash| StoredPage {
            sequence_hash: hash,
            local_hash: hash,
            tokens: Box::default(),
        };
        KvEvent::Stored {
            tier,
            ns: serde_json::from_str("0").unwrap(),
            parent: None,
            pages: hashes.iter().map(page).collect(),
        }
    }

    fn removed(tier: EventTier, hashes: &[u64]) -> KvEvent {
        KvEvent::Removed {
            tier,
            hashes: hashes.to_vec(),
        }
    }

    #[test]
    fn what_host_keeps_has_moved_down_and_what_it_drops_is_gone() {
        let mut all = Departures::default();
        all.hear(&stored(DEVICE, &[1, 2, 3]), false, 0);
        all.hear(&stored(EventTier::Host, &[1, 2]), false, 0);
        all.hear(&removed(DEVICE, &[3, 2]), false, SECOND);
        all.hear(&removed(DEVICE, &[1]), false, SECOND + 5);
        all.hear(&removed(EventTier::Host, &[2]), false, SECOND + 6);
        all.hear(&removed(DEVICE, &[2]), true, 9 * SECOND);
        let told: Vec<_> = all
            .list()
            .map(|one| (one.tier, one.reason, one.pages, one.moved_down))
            .collect();
        assert_eq!(
            told,
            [
                (DEVICE, Reason::Ephemeral, 1, 0),
                (EventTier::Host, Reason::Room, 1, 0),
                (DEVICE, Reason::Room, 3, 2),
            ]
        );
        assert_eq!(all.moved_down(), 2);
    }

    #[test]
    fn the_list_is_bounded_and_a_flush_is_an_entry() {
        let mut all = Departures::default();
        for second in 0..500 {
            all.hear(&removed(DEVICE, &[second]), false, second * 2 * SECOND);
        }
        assert_eq!(all.list().count(), DEPARTURES_MAX);
        all.hear(&KvEvent::Cleared { tier: DEVICE }, false, 2000 * SECOND);
        assert_eq!(all.list().next().unwrap().reason, Reason::Flush);
        assert_eq!(all.list().count(), DEPARTURES_MAX);
    }
}
