//! A store for the random worlds: plans are carried out late and in order, some pages fail, some
//! get lost, and what lies at an address never changes.

#![expect(clippy::cast_possible_truncation, reason = "a test of tiny sizes")]

use crate::tiers::{Bytes, Request, World};
use rootstock_memory::{PageAddress, StoreEvent, StoreOp, StorePlan, TierId};
use rootstock_radix::Key;
use std::collections::{BTreeMap, VecDeque};

#[derive(Default)]
pub(crate) struct FakeStore {
    pages: BTreeMap<PageAddress, Bytes>,
    plans: VecDeque<StorePlan>,
    pub(crate) arrived: u64,
    /// Found by a look.
    pub(crate) seen: u64,
}

impl FakeStore {
    pub(crate) fn is_idle(&self) -> bool {
        self.plans.is_empty()
    }

    /// Whether a flush has to wait for it.
    pub(crate) fn keeps(&self) -> bool {
        let moves = |op| matches!(op, StoreOp::Write | StoreOp::Read);
        self.plans.iter().any(|plan| moves(plan.op))
    }
}

impl World {
    pub(crate) fn submit_store(&mut self) {
        let mut plans = Vec::new();
        self.cache.drain_store(&mut plans);
        for plan in plans {
            for page in &plan.pages {
                let bytes = self
                    .memory
                    .get(&(TierId::Host, page.host))
                    .cloned()
                    .flatten();
                match plan.op {
                    StoreOp::Write => assert!(bytes.is_some(), "a write of undefined bytes"),
                    StoreOp::Read => {
                        self.memory.insert((TierId::Host, page.host), None);
                    }
                    StoreOp::Look | StoreOp::Clear => {}
                }
            }
            self.store.plans.push_back(plan);
        }
    }

    pub(crate) fn fetch(&mut self) {
        let Some(at) = self.pick() else { return };
        let Request {
            ns, tokens, lease, ..
        } = &self.requests[at];
        let key = Key { ns: *ns, tokens };
        // What it starts comes out with the plans.
        if self.random.below(2) == 0 {
            let _ = self.cache.fetch(lease, key, u32::MAX, self.now);
        } else {
            self.cache.read_ahead(key, self.now);
        }
    }

    /// Tells of pages that went or are there, attaches and detaches.
    pub(crate) fn meddle(&mut self) {
        let all: Vec<PageAddress> = self.store.pages.keys().copied().collect();
        let some = (!all.is_empty()).then(|| all[self.random.below(all.len() as u64) as usize]);
        match self.random.below(30) {
            0 => self.cache.detach_storage(),
            1 => {
                let probes = self.random.below(3) as u32;
                // Who looks need not be told.
                let told = probes == 0 || self.random.below(2) == 0;
                if self.cache.attach_storage(30, probes) && told {
                    self.cache.store_event(StoreEvent::Learned(all), self.now);
                }
            }
            2 => self.cache.store_event(StoreEvent::Learned(all), self.now),
            3..=5 => {
                if let Some(address) = some {
                    self.store.pages.remove(&address);
                    // Sometimes nobody says so.
                    if self.random.below(2) == 0 {
                        let lost = StoreEvent::Lost(vec![address]);
                        self.cache.store_event(lost, self.now);
                    }
                }
            }
            _ => self.acknowledge_store(),
        }
    }

    /// Carries out the oldest plan.
    pub(crate) fn acknowledge_store(&mut self) {
        let Some(plan) = self.store.plans.pop_front() else {
            return;
        };
        let mut pages = vec![false; plan.pages.len()];
        for (page, ok) in plan.pages.iter().zip(&mut pages) {
            let (place, fails) = ((TierId::Host, page.host), self.random.below(8) == 0);
            match plan.op {
                StoreOp::Write => {
                    let bytes = self.memory[&place].clone();
                    let (_, prefix) = bytes.as_ref().expect("what is written is kept");
                    assert!(prefix.ends_with(&page.tokens));
                    assert_eq!(page.address, page.parent.next(&page.tokens));
                    *ok = !fails;
                    if *ok {
                        let before = self.store.pages.insert(page.address, bytes.clone());
                        assert!(before.is_none_or(|before| before == bytes), "one content");
                    }
                }
                StoreOp::Read => {
                    assert!(self.memory[&place].is_none(), "a destination was used");
                    let there = self.store.pages.get(&page.address).filter(|_| !fails);
                    let Some(bytes) = there.cloned() else { break };
                    self.memory.insert(place, bytes);
                    self.store.arrived += 1;
                    *ok = true;
                }
                StoreOp::Look => {
                    *ok = self.store.pages.contains_key(&page.address) && !fails;
                    if !*ok {
                        break;
                    }
                    self.store.seen += 1;
                }
                StoreOp::Clear => {}
            }
        }
        if plan.op == StoreOp::Clear {
            self.store.pages.clear();
        }
        let done = StoreEvent::Done { id: plan.id, pages };
        self.cache.store_event(done, self.now);
    }
}
