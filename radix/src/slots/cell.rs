//! What a slot tree knows of a node beside its edge, and in which order nodes go.

use super::digest::Digest;
use super::order::CLASS_BITS;
use super::programs::Owner;
use super::{Handle, SlotTree};
use crate::node::Node;

/// Sorts before another: evicted first.
pub(super) type Rank = (i64, i64);

/// Which node goes first.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum SlotPolicy {
    /// Least recently used first.
    Lru,
    /// Fewest insertions first, then least recently used.
    Lfu,
    /// What was inserted less often than `hits` first, then least recently used.
    Slru {
        /// Insertions from which on a node is protected.
        hits: f64,
    },
    /// Lowest priority first, then least recently used.
    Priority,
    /// What no next prompt needs within its budget first, then least recently used.
    Tlru {
        /// Tokens that a next prompt may compute.
        threshold: f64,
        /// Tokens that a next prompt brings.
        estimate: f64,
    },
    /// What came in first.
    Fifo,
    /// What came in last.
    Filo,
    /// Most recently used first.
    Mru,
    /// What brings the fewest uses per second of memory first, as learned from the load.
    Agent,
}

/// State of a node.
#[derive(Debug, Default)]
pub(super) struct Cell {
    pub(super) device: Option<Vec<i64>>,
    pub(super) host: Option<Vec<i64>>,
    pub(super) leases: u32,
    pub(super) host_leases: u32,
    /// Where a hold on host copies ends: the uppermost part of the node that was held.
    pub(super) host_edge: Option<u64>,
    /// Children that are on the device.
    pub(super) kids: u32,
    pub(super) hits: u32,
    pub(super) priority: i64,
    pub(super) used: i64,
    pub(super) created: i64,
    /// Tokens of the longest prefix through it that there ever was.
    pub(super) crest: u64,
    /// The copy to the host tier under way, by its acknowledgment.
    pub(super) writing: Option<u64>,
    /// The node for which it is being loaded.
    pub(super) loading: Option<Handle>,
    /// Names of its pages in stores.
    pub(super) digests: Option<Vec<Digest>>,
    /// Names of its pages in events, where they differ.
    pub(super) event_digests: Option<Vec<Digest>>,
    /// Place among the nodes that are on both tiers.
    pub(super) twin: Option<u64>,
    pub(super) pins: u32,
    pub(super) owner: Owner,
    /// What was said about it: higher stays longer, whatever the policy.
    pub(super) retained: i32,
    /// The walk under way has offered it in vain.
    pub(super) passed: bool,
    /// Its program is over: it goes before all else.
    pub(super) spent: bool,
    /// Where it stands in the orders of the tiers.
    pub(super) ranks: [Option<Rank>; 2],
}

fn cut<T>(all: &mut Option<Vec<T>>, at: usize) -> Option<Vec<T>> {
    let lower = all.as_mut()?.split_off(at);
    all.replace(lower)
}

impl Cell {
    pub(super) fn root() -> Self {
        Self {
            priority: i64::MIN,
            ..Self::default()
        }
    }

    pub(super) fn device_tokens(&self) -> u64 {
        self.device.as_ref().map_or(0, |slots| slots.len() as u64)
    }

    /// Cuts after `tokens`, which are `pages`; the upper part is returned.
    pub(super) fn split(&mut self, tokens: usize, pages: usize) -> Self {
        let device = cut(&mut self.device, tokens);
        Self {
            kids: device.is_some().into(),
            device,
            host: cut(&mut self.host, tokens),
            leases: self.leases,
            host_leases: self.host_leases,
            host_edge: self.host_edge.take(),
            hits: self.hits,
            priority: self.priority,
            used: self.used,
            created: self.created,
            crest: self.crest,
            writing: self.writing,
            loading: self.loading,
            digests: cut(&mut self.digests, pages),
            event_digests: cut(&mut self.event_digests, pages),
            twin: None,
            pins: self.pins,
            owner: self.owner,
            retained: self.retained,
            passed: self.passed,
            spent: self.spent,
            ranks: [None, None],
        }
    }

    fn rank(&self, policy: SlotPolicy, node: &Node, page_tokens: u64) -> Rank {
        if self.pins > 0 {
            return (i64::MAX, self.used);
        }
        if self.spent {
            return (i64::MIN, self.used);
        }
        let (class, order) = self.class(policy, node, page_tokens);
        if self.retained == 0 {
            return (class, order);
        }
        // Every class within a priority, and below the next.
        let most = (1 << (CLASS_BITS - 1)) - 1;
        let base = i64::from(self.retained) << CLASS_BITS;
        (base.saturating_add(class.clamp(-most, most)), order)
    }

    fn class(&self, policy: SlotPolicy, node: &Node, page_tokens: u64) -> Rank {
        let class = match policy {
            SlotPolicy::Lru | SlotPolicy::Agent => 0,
            SlotPolicy::Lfu => self.hits.into(),
            SlotPolicy::Slru { hits } => (f64::from(self.hits) >= hits).into(),
            SlotPolicy::Priority => self.priority,
            SlotPolicy::Tlru {
                threshold,
                estimate,
            } => {
                let needed = (exact(self.crest) + estimate - threshold).max(0.0);
                let is_safe = exact(u64::from(node.depth) * page_tokens) >= needed;
                -i64::from(is_safe)
            }
            SlotPolicy::Fifo => return (0, self.created),
            SlotPolicy::Filo => return (0, -self.created),
            SlotPolicy::Mru => return (0, -self.used),
        };
        (class, self.used)
    }
}

/// Tokens of one path are far below 2^53.
#[expect(
    clippy::cast_precision_loss,
    reason = "tokens of one path are below 2^53"
)]
const fn exact(tokens: u64) -> f64 {
    tokens as f64
}

impl SlotTree {
    fn is_device_leaf(&self, at: u32) -> bool {
        let cell = self.cell(at);
        cell.device.is_some() && cell.leases == 0 && cell.kids == 0 && !cell.passed
    }

    fn is_host_leaf(&self, at: u32) -> bool {
        let cell = self.cell(at);
        let is_idle = cell.leases == 0 && cell.host_leases == 0 && cell.pins == 0;
        cell.device.is_none() && cell.host.is_some() && is_idle && self.tree.node(at).is_leaf()
    }

    /// Where a node stands in the order of each tier, if it is a candidate there.
    pub(super) fn ranks_of(&self, at: u32) -> [Option<Rank>; 2] {
        if self.is_root_at(at) {
            return [None, None];
        }
        let page_tokens = u64::from(self.config.page_tokens);
        let rank = || {
            let node = self.tree.node(at);
            self.cell(at).rank(self.config.policy, node, page_tokens)
        };
        [
            self.is_device_leaf(at).then(rank),
            self.is_host_leaf(at).then(rank),
        ]
    }

    /// Puts a node where it belongs in the orders: after each change of what they depend on.
    pub(super) fn refresh(&mut self, at: u32) {
        let now = self.ranks_of(at);
        let before = self.cell(at).ranks;
        if now == before {
            return;
        }
        for ((order, before), now) in self.orders.iter_mut().zip(before).zip(now) {
            if before == now {
                continue;
            }
            if let Some(rank) = before {
                order.remove(rank, at);
            }
            if let Some(rank) = now {
                order.insert(rank, at);
            }
        }
        self.cell_mut(at).ranks = now;
    }

    /// Takes a node out of the orders.
    pub(super) fn unrank(&mut self, at: u32) {
        let before = std::mem::take(&mut self.cell_mut(at).ranks);
        for (order, rank) in self.orders.iter_mut().zip(before) {
            if let Some(rank) = rank {
                order.remove(rank, at);
            }
        }
    }

    /// Touches a node alone.
    pub(super) fn touch(&mut self, at: u32) {
        let now = self.tick();
        let cell = self.cell_mut(at);
        cell.used = now;
        cell.spent = false;
        self.refresh(at);
    }

    pub(super) fn is_twin(&self, at: u32) -> bool {
        let cell = self.cell(at);
        let is_settled = cell.writing.is_none() && cell.loading.is_none();
        let is_both = cell.device.is_some() && cell.host.is_some();
        is_both && is_settled && !self.is_root_at(at)
    }

    /// Notes whether a node is on both tiers with no copy under way.
    pub(super) fn track_twin(&mut self, at: u32) {
        if !self.is_twin(at) {
            self.untrack_twin(at);
        } else if self.cell(at).twin.is_none() {
            self.serial += 1;
            let serial = self.serial;
            self.cell_mut(at).twin = Some(serial);
            self.twins.insert(serial, at);
        }
    }

    pub(super) fn untrack_twin(&mut self, at: u32) {
        if let Some(serial) = self.cell_mut(at).twin.take() {
            self.twins.remove(&serial);
        }
    }
}
