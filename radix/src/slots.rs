//! The tree for hosts that own their KV slots: which prefix is in which slots of the host's pools,
//! device and host tier, and which node goes first. [`SlotTree`] allocates and frees nothing. It
//! takes the slots that the host has filled and tells which ones are free again.
//!
//! ```text
//!                  insert                 commit_backup              demote
//!   host's slots ---------> device only ----------------> on both ----------> host only
//!        ^                      |                            ^   commit_load     |
//!        |        take_leaf     |                            +-------------------+
//!        +----------------------+                                    | evict_host
//!        +-----------------------------------------------------------+
//! ```
//! A node is in a tier as a whole. What is on the device has its parent on the device. A node
//! with children on the device, or with a lease, is not evicted there; one with children or a
//! lease is not evicted from the host tier. Long operations are cut where the host must act in
//! between: an insertion stops at a backup ([`SlotTree::begin_insert`]), an eviction after each
//! node ([`SlotTree::begin_walk`]).
//!
//! Order: a logical clock counts touches; a lookup gives a path one reading, each parent a bit
//! less than its child. The candidates of a tier are an ordered set, so that evicting k nodes
//! never scans the tree. Semantics and order are those of SGLang 0.5.23
//! (`unified_cache/unified_tree_core.py`), so that its controller can drive it.
//!
//! What [`crate::PrefixCache`] has as well is one code: nodes, token runs, the child table and
//! splits (`tree`), policy `agent` with its shelf and what it learns (`policy::agent`), what a
//! request leaves behind (`policy::agent::branch`), retention (`retain`), hints, and gaps that
//! are believed (`program`). What differs does so because the host differs:
//!
//! - Pages are allocated by the cache, whose pools, reservations and conservation of free pages
//!   have no place here: a node has its slots, in each tier, or has not.
//! - A lease of a request on pages covers a span and survives cuts; here leases are counts on
//!   nodes, with receipts, as the host's protocol has them.
//! - The order is SGLang's own to the last tie, over its logical clock.
//! - The cache plans copies and waits for them; here the host asks node by node, with its
//!   acknowledgments, and whole nodes go, where the cache cuts an edge to free its tail.
//! - Pages are named by SGLang's SHA-256 chains, one for stores and one for events.
//! - Programs are numbers that the host made, and where their prefixes end; in the cache they
//!   have names, parents, gaps and wakes.

mod cell;
mod check;
mod digest;
mod evict;
mod insert;
mod load;
mod look;
mod order;
mod pins;
mod programs;
mod worth;

pub use cell::SlotPolicy;
pub use digest::{Digest, Hasher, SlotEvent};
pub use evict::{Freed, LeafEnd};
pub use insert::{Inserted, Insertion, SlotAction, Step};
pub use load::{HostInserted, LoadPlan, Place};
pub use look::{PathPart, SlotCopy, SlotMatch, SlotRow};
pub use worth::{Asker, Learned};

use crate::node::NIL;
use crate::policy::agent::Agent;
use crate::program::NamedGaps;
use crate::retain::Retention;
use crate::tree::{Hashing, Tree};
use ahash::RandomState;
use cell::Cell;
use evict::Walk;
use insert::Walking;
use order::Candidates;
use rootstock_memory::Nanos;
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// A node, for the host: never given twice, also not after [`SlotTree::reset`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Handle(pub u64);

/// Touches between which parents find a place below their children.
const LEVELS: i64 = 100_000;

/// Sizes and choices of a slot tree.
#[derive(Clone, Copy, Debug)]
pub struct SlotConfig {
    /// Tokens a page: the grain of matching, and of splits.
    pub page_tokens: u32,
    /// Which node goes first.
    pub policy: SlotPolicy,
    /// Makes events of what comes and goes.
    pub events: bool,
    /// How pages are named, for events and for stores.
    pub hasher: Hasher,
    /// Share that pins may hold of the tokens of the host tier; of the device where there is no
    /// host tier.
    pub pin_budget: f64,
    /// Tokens that the device pool holds.
    pub device_tokens: u64,
}

/// A part of the content that is never shared with another: who asks, and for which adapter.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct SpaceName {
    /// What else the KV depends on.
    pub extra: Option<String>,
    /// Whose it is.
    pub salt: Option<String>,
}

impl SpaceName {
    fn is_common(&self) -> bool {
        self.extra.is_none() && self.salt.is_none()
    }
}

#[derive(Debug)]
struct Space {
    name: SpaceName,
    /// What the names of its first pages chain on: those for stores, those of events.
    seeds: [Option<Digest>; 2],
}

/// A mistake of the host.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum SlotError {
    /// The node is gone.
    #[error("node {0} does not exist")]
    Missing(u64),
    /// A key without a whole number of pages, or another number of slots than of tokens.
    #[error("{tokens} tokens and {slots} slots, pages of {page_tokens} tokens")]
    Length {
        /// Tokens of the key.
        tokens: usize,
        /// Slots for them.
        slots: usize,
        /// Tokens a page.
        page_tokens: u32,
    },
    /// The node is not in the state that the call needs.
    #[error("node {node} {what}")]
    State {
        /// Which node.
        node: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// Insertions do not nest.
    #[error("an insertion is {0}")]
    Insertion(&'static str),
}

/// How nodes reach the host tier.
#[derive(Clone, Copy, Debug)]
pub struct HostTier {
    /// There is one.
    pub enabled: bool,
    /// Nodes are copied when they are evicted from the device, not before.
    pub write_back: bool,
    /// Insertions of a node from which on it is copied at once.
    pub write_through_hits: u32,
    /// Stores below name pages.
    pub storage: bool,
    /// Tokens that it holds, for the budget of pins; 0 where that is not known.
    pub tokens: u64,
}

/// The tree.
#[derive(Debug)]
pub struct SlotTree {
    config: SlotConfig,
    /// How nodes reach the host tier; the host may change it between calls.
    pub host: HostTier,
    tree: Tree,
    cells: Vec<Cell>,
    root: u32,
    roots: BTreeMap<SpaceName, u32>,
    spaces: BTreeMap<u32, Space>,
    clock: i64,
    /// Candidates of the device and of the host tier.
    orders: [Candidates; 2],
    agent: Option<Box<Agent>>,
    retention: Retention,
    gaps: NamedGaps,
    now: Nanos,
    evictable: u64,
    protected: u64,
    /// Nodes with a host copy that the device has as well, in the order they became such.
    twins: BTreeMap<u64, u32>,
    serial: u64,
    reclaimed: u64,
    walking: Option<Walking>,
    walk: Option<Walk>,
    events: Vec<SlotEvent>,
    pins: BTreeMap<(Nanos, u64), pins::Pin>,
    pinned_tokens: u64,
    lost_tokens: u64,
    programs: programs::Programs,
}

impl SlotTree {
    /// An empty tree without a host tier.
    ///
    /// # Panics
    /// If a page has no token.
    #[must_use]
    pub fn new(config: SlotConfig) -> Self {
        assert!(config.page_tokens > 0, "a page has tokens");
        let hashing = Hashing::Seeded(RandomState::with_seeds(1, 2, 3, 4));
        let mut tree = Self {
            config,
            host: HostTier {
                enabled: false,
                write_back: false,
                write_through_hits: 256,
                storage: false,
                tokens: 0,
            },
            tree: Tree::new(config.page_tokens, u32::MAX, hashing),
            cells: Vec::new(),
            root: NIL,
            roots: BTreeMap::new(),
            spaces: BTreeMap::new(),
            clock: 0,
            orders: [
                Candidates::Ranked(BTreeSet::new()),
                Candidates::Ranked(BTreeSet::new()),
            ],
            agent: None,
            retention: Retention::default(),
            gaps: NamedGaps::default(),
            now: 0,
            evictable: 0,
            protected: 0,
            twins: BTreeMap::new(),
            serial: 0,
            reclaimed: 0,
            walking: None,
            walk: None,
            events: Vec::new(),
            pins: BTreeMap::new(),
            pinned_tokens: 0,
            lost_tokens: 0,
            programs: programs::Programs::default(),
        };
        tree.reset();
        tree
    }

    /// Forgets everything, without events. Slots that nodes held are the host's again.
    pub fn reset(&mut self) {
        self.tree.clear();
        self.cells.clear();
        self.roots.clear();
        self.spaces.clear();
        (self.evictable, self.protected) = (0, 0);
        self.twins.clear();
        self.reclaimed = 0;
        (self.walking, self.walk) = (None, None);
        self.pins.clear();
        self.pinned_tokens = 0;
        self.programs = programs::Programs::default();
        self.retention = Retention::default();
        (self.orders, self.agent) = self.new_orders();
        self.root = self.add_root(SpaceName::default(), [None, None]);
    }

    fn add_root(&mut self, name: SpaceName, seeds: [Option<Digest>; 2]) -> u32 {
        let at = self.tree.add_root();
        *self.cell_slot(at) = Cell::root();
        self.roots.insert(name.clone(), at);
        self.spaces.insert(at, Space { name, seeds });
        at
    }

    /// The root of a namespace, made when there is none. `seeds` are what the names of its first
    /// pages chain on, in stores and in events.
    fn space(&mut self, name: &SpaceName, seeds: [Option<Digest>; 2]) -> u32 {
        match self.roots.get(name) {
            Some(&at) => at,
            None => self.add_root(name.clone(), seeds),
        }
    }

    /// Room for the state of a new node.
    fn cell_slot(&mut self, at: u32) -> &mut Cell {
        if self.cells.len() <= at as usize {
            self.cells.resize_with(at as usize + 1, Cell::default);
        }
        &mut self.cells[at as usize]
    }

    fn cell(&self, at: u32) -> &Cell {
        &self.cells[at as usize]
    }

    fn cell_mut(&mut self, at: u32) -> &mut Cell {
        &mut self.cells[at as usize]
    }

    /// All namespaces have one handle for their root.
    fn handle(&self, at: u32) -> Handle {
        let at = if self.tree.node(at).is_root() {
            self.root
        } else {
            at
        };
        Handle(u64::from(self.tree.node(at).generation.get()) << 32 | u64::from(at))
    }

    fn find(&self, handle: Handle) -> Result<u32, SlotError> {
        let at = handle.0 & u64::from(u32::MAX);
        let node = usize::try_from(at)
            .ok()
            .and_then(|at| self.tree.nodes.get(at));
        match node {
            Some(node) if u64::from(node.generation.get()) == handle.0 >> 32 => {
                Ok(u32::try_from(at).unwrap_or(NIL))
            }
            Some(_) | None => Err(SlotError::Missing(handle.0)),
        }
    }

    fn is_root_at(&self, at: u32) -> bool {
        self.tree.node(at).is_root()
    }

    fn parent(&self, at: u32) -> u32 {
        self.tree.node(at).parent
    }

    fn children(&self, at: u32) -> impl Iterator<Item = u32> {
        let first = Some(self.tree.node(at).first_child).filter(|&at| at != NIL);
        std::iter::successors(first, |&at| {
            Some(self.tree.node(at).next_sibling).filter(|&at| at != NIL)
        })
    }

    /// Tokens of the edge of a node.
    fn len_of(&self, at: u32) -> usize {
        self.tree.node(at).pages as usize * self.tree.page_tokens()
    }

    /// Reads the clock: no two readings are equal.
    fn tick(&mut self) -> i64 {
        self.clock += LEVELS;
        self.clock
    }

    /// Cuts the edge of `at`; the new upper part is returned, and what the host must learn.
    fn split(&mut self, at: u32, pages: u32) -> (u32, Option<SlotAction>) {
        let upper = self.tree.split(at, pages);
        let tokens = self.len_of(upper);
        let (used, touched) = (self.tick(), self.tick());
        self.unrank(at);
        let lower = self.cell_mut(at);
        let mut cell = lower.split(tokens, pages as usize);
        cell.used = used;
        lower.used = touched;
        let writing = cell.writing;
        *self.cell_slot(upper) = cell;
        self.retention.split(at, upper);
        if let Some(agent) = &mut self.agent {
            agent.split(at, upper, self.tree.node(at).depth);
        }
        for order in &mut self.orders {
            let mark = order.mark_of(at);
            if let Some(shelf) = order.shelf() {
                shelf.mark(upper, mark);
            }
        }
        self.refresh(upper);
        self.refresh(at);
        self.track_twin(upper);
        let action = writing.map(|ack| SlotAction::Split {
            ack,
            upper: self.handle(upper),
            lower: self.handle(at),
        });
        (upper, action)
    }

    /// Holds a path, whatever is on the device of it; returns the tokens that are protected now.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn lease(&mut self, handle: Handle) -> Result<u64, SlotError> {
        let mut at = self.find(handle)?;
        let mut moved = 0;
        while !self.is_root_at(at) {
            let cell = self.cell_mut(at);
            cell.leases += 1;
            if cell.leases == 1 {
                let tokens = cell.device_tokens();
                moved += tokens;
                self.evictable -= tokens;
                self.protected += tokens;
                self.refresh(at);
            }
            at = self.parent(at);
        }
        Ok(moved)
    }

    /// Gives a lease back.
    ///
    /// # Errors
    /// When the node is gone, or nobody has a lease.
    pub fn release(&mut self, handle: Handle) -> Result<(), SlotError> {
        let mut at = self.find(handle)?;
        while !self.is_root_at(at) {
            let cell = self.cell_mut(at);
            if cell.leases == 0 {
                let what = "is released more often than it was leased";
                return Err(SlotError::State {
                    node: handle.0,
                    what,
                });
            }
            cell.leases -= 1;
            if cell.leases == 0 {
                let tokens = cell.device_tokens();
                self.evictable += tokens;
                self.protected -= tokens;
                self.refresh(at);
                self.retention.touch(at, self.now);
                self.settle(at);
            }
            at = self.parent(at);
        }
        Ok(())
    }

    /// Holds the host copy of a node alone. The receipt is `None` when there is nothing to hold.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn lease_host(&mut self, handle: Handle) -> Result<Option<u64>, SlotError> {
        let at = self.find(handle)?;
        let (write_back, serial) = (self.host.write_back, self.serial + 1);
        let cell = self.cell_mut(at);
        if cell.host.is_none() && !write_back {
            return Ok(None);
        }
        let receipt = *cell.host_edge.get_or_insert(serial);
        cell.host_leases += 1;
        self.serial = serial;
        self.refresh(at);
        Ok(Some(receipt))
    }

    /// Gives the hold on a host copy back, also where the node was split since.
    ///
    /// # Errors
    /// When the node is gone, or the receipt is not of it.
    pub fn release_host(&mut self, handle: Handle, receipt: u64) -> Result<(), SlotError> {
        let mut at = self.find(handle)?;
        loop {
            let write_back = self.host.write_back;
            let cell = self.cell_mut(at);
            if cell.host.is_none() && !write_back {
                return Ok(());
            }
            if cell.host_leases == 0 {
                let what = "has no lease on its host copy";
                return Err(SlotError::State {
                    node: handle.0,
                    what,
                });
            }
            cell.host_leases -= 1;
            let is_edge = cell.host_edge == Some(receipt);
            self.refresh(at);
            if is_edge {
                return Ok(());
            }
            if self.is_root_at(at) {
                let what = "has another receipt";
                return Err(SlotError::State {
                    node: handle.0,
                    what,
                });
            }
            at = self.parent(at);
        }
    }

    /// Device tokens that eviction can free.
    #[must_use]
    pub const fn evictable(&self) -> u64 {
        self.evictable
    }

    /// Device tokens that leases and pins hold.
    #[must_use]
    pub const fn protected(&self) -> u64 {
        self.protected
    }

    /// The root of all namespaces.
    #[must_use]
    pub fn root(&self) -> Handle {
        self.handle(self.root)
    }

    /// Folds which host copies were given up for device copies, in their order: equal on all ranks
    /// of one engine.
    #[must_use]
    pub const fn reclaim_digest(&self) -> u64 {
        self.reclaimed
    }
}
