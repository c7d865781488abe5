//! Verbs on a whole program: on all prefixes that its last branches left in the cache, each page
//! counted once.
//!
//! ```text
//!   a program's prefixes:   root ---- shared ---+--- branch a   } what two have in common is done
//!                                               +--- branch b   } and counted with the first
//! ```

use crate::cache::PrefixCache;
use crate::node::Ends;
use crate::{ActReason, Action, Outcome, ProgramId, Target, TenantId, Token};
use rootstock_memory::Nanos;
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;

/// Where the pages of a program are; those that it shares with others count in full.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ProgramPages {
    /// In the tree, each once.
    pub distinct: u32,
    /// On the devices of all replicas.
    pub device: u32,
    /// On host.
    pub host: u32,
    /// Known to be in storage too.
    pub storage: u32,
    /// Pinned.
    pub pinned: u32,
}

/// A prefix of a program.
struct Branch {
    end: (u32, NonZeroU32),
    /// Its first pages that it shares with a newer one, and where that one ends.
    shared: u32,
    beside: Option<u32>,
}

/// What came of a verb on several prefixes.
#[derive(Default)]
struct Sum {
    pages: u32,
    asked_pages: u32,
    deferred: bool,
    refused: Option<ActReason>,
}

impl Sum {
    fn add(&mut self, outcome: Outcome, shared: u32, end: u32) {
        let all = match outcome {
            Outcome::Accepted { pages } | Outcome::Clipped { pages, .. } => pages,
            Outcome::Deferred { pages } => {
                self.deferred = true;
                self.pages += pages;
                shared
            }
            Outcome::Rejected(reason) => {
                self.refused = Some(reason);
                0
            }
            Outcome::Missing => 0,
        };
        self.pages += all.saturating_sub(shared);
        self.asked_pages += end - shared;
    }

    fn outcome(self) -> Outcome {
        let Self {
            pages, asked_pages, ..
        } = self;
        match self.refused {
            _ if self.deferred => Outcome::Deferred { pages },
            Some(reason) if pages == 0 => Outcome::Rejected(reason),
            None if asked_pages == 0 => Outcome::Missing,
            _ if pages < asked_pages => Outcome::Clipped { pages, asked_pages },
            _ => Outcome::Accepted { pages },
        }
    }
}

impl PrefixCache {
    /// Does a verb for the tenant whose program it is.
    pub(crate) fn act_on_program(
        &mut self,
        tenant: TenantId,
        id: ProgramId,
        action: &Action,
        now: Nanos,
    ) -> Outcome {
        let Some((_, ns)) = self.programs.owner(id).filter(|owner| owner.0 == tenant) else {
            return Outcome::Missing;
        };
        if matches!(action, Action::Release { .. }) {
            return self.release_program(tenant, id, now);
        }
        if matches!(action, Action::Prefetch { .. }) {
            self.expect_now(id, now);
        }
        let mut sum = Sum::default();
        for Branch { end, shared, .. } in self.branches(id) {
            if !self.is_node(end.0, end.1) {
                continue;
            }
            let pages = self.tree.node(end.0).end();
            let tokens = self.path_tokens(end.0);
            let part = action.on(Target::Prefix { ns, tokens });
            let done = self.act_on_prefix(tenant, &part, now);
            sum.add(done, shared, pages);
        }
        sum.outcome()
    }

    /// Gives up the pins of a program's owner on its prefixes, and lets what the program alone uses
    /// go first.
    fn release_program(&mut self, tenant: TenantId, id: ProgramId, now: Nanos) -> Outcome {
        let (mut unpinned, mut given_up, mut asked_pages) = (0, 0, 0);
        for Branch {
            end: (at, generation),
            shared,
            beside,
        } in self.branches(id)
        {
            if !self.is_node(at, generation) {
                continue;
            }
            asked_pages += self.tree.node(at).end() - shared;
            unpinned += self.unpin_path(tenant, at);
            given_up += self.give_up_branch(at, beside, id.0, now);
        }
        self.programs.set_done(id);
        self.closed(id, now);
        match unpinned.max(given_up) {
            0 if asked_pages == 0 => Outcome::Missing,
            pages if pages < asked_pages => Outcome::Clipped { pages, asked_pages },
            pages => Outcome::Accepted { pages },
        }
    }

    /// A request of a program has ended in the node `last`: its prefix is one of the program's.
    pub(crate) fn note_branch(&mut self, id: ProgramId, last: u32) {
        let live = self.live_ends(id);
        let known = live.iter().any(|end| end.0 == last);
        let node = self.tree.node_mut(last);
        node.ends = match node.ends {
            Ends::None => Ends::One,
            Ends::One if known => Ends::One,
            Ends::One | Ends::Many => Ends::Many,
        };
        let apart = |end: &(u32, NonZeroU32)| {
            let (at, to) = (end.0, self.tree.node(end.0).end());
            self.normal(last, to) != at || self.tree.node(last).end() < to
        };
        let mut ends: Vec<_> = live.into_iter().filter(apart).collect();
        if !self.tree.node(last).is_root() {
            ends.push((last, self.tree.node(last).generation));
        }
        self.programs.set_ends(id, ends);
    }

    /// Distinct pages of all prefixes of a program that some tier has.
    pub fn program_pages(&self, id: ProgramId) -> u32 {
        let branches = self.branches(id);
        let own = branches
            .iter()
            .map(|branch| self.tree.node(branch.end.0).end() - branch.shared);
        own.sum()
    }

    /// Where the pages of all prefixes of a program are.
    pub fn program_holds(&self, id: ProgramId) -> ProgramPages {
        let mut sum = ProgramPages::default();
        for Branch { end, shared, .. } in self.branches(id) {
            let last = self.tree.node(end.0).end();
            for at in self.nodes_between(end.0, shared, last) {
                let pages = self.tree.node(at).pages;
                sum.distinct += pages;
                sum.pinned += if self.is_pinned(at) { pages } else { 0 };
                sum.storage += self.stored_pages(at);
                for (tier, holds) in self.tiers.iter().enumerate() {
                    match holds.is_resident(at) {
                        true if Some(tier) == self.host => sum.host += pages,
                        true => sum.device += pages,
                        false => {}
                    }
                }
            }
        }
        sum
    }

    /// The prefixes of a program that are still cached, the newest first.
    fn branches(&self, id: ProgramId) -> Vec<Branch> {
        let ends: Vec<_> = self.live_ends(id).into_iter().rev().collect();
        let branch = |(index, &end): (usize, &(u32, NonZeroU32))| {
            let before = ends[..index].iter();
            let most = before
                .map(|other| (self.common_pages_of(end.0, other.0), other.0))
                .max();
            Branch {
                end,
                shared: most.map_or(0, |most| most.0),
                beside: most.map(|most| most.1),
            }
        };
        ends.iter().enumerate().map(branch).collect()
    }

    fn live_ends(&self, id: ProgramId) -> Vec<(u32, NonZeroU32)> {
        let ends = self.programs.ends(id).iter().copied();
        ends.filter(|&(at, generation)| self.is_node(at, generation))
            .collect()
    }

    /// Pages that the paths of two nodes have in common.
    fn common_pages_of(&self, mut a: u32, mut b: u32) -> u32 {
        while a != b {
            if self.tree.node(a).end() >= self.tree.node(b).end() {
                a = self.tree.node(a).parent;
            } else {
                b = self.tree.node(b).parent;
            }
        }
        self.tree.node(a).end()
    }

    /// The tokens of the prefix that ends with `at`.
    pub(crate) fn path_tokens(&self, mut at: u32) -> Vec<Token> {
        let mut edges = Vec::new();
        while !self.tree.node(at).is_root() {
            edges.push(self.tree.tokens_from(self.tree.node(at), 0));
            at = self.tree.node(at).parent;
        }
        edges.into_iter().rev().flatten().collect()
    }
}
