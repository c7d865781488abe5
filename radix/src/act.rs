//! Verbs of the control API as data, and their answers.

use crate::{NamespaceId, ProgramId, Token, Ttl};
use rootstock_memory::ReplicaId;
use serde::{Deserialize, Serialize};

/// What a verb acts on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Target {
    /// A prefix by its content.
    Prefix {
        /// Namespace.
        ns: NamespaceId,
        /// Tokens; a last partial page is left out.
        tokens: Vec<Token>,
    },
    /// All that a program holds: the prefixes of its last branches.
    Program(ProgramId),
}

/// A verb.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Action {
    /// Keep the bytes until the deadline: under pressure they demote, they are not dropped.
    Pin {
        /// On what.
        target: Target,
        /// For how long.
        ttl: Ttl,
    },
    /// Raise the importance, for a while or for good.
    Retain {
        /// On what.
        target: Target,
        /// New importance; it never lowers what is there.
        priority: i32,
        /// Seconds of idleness after which the importance falls back; `None` is never.
        seconds: Option<u64>,
    },
    /// Bring lower tiers up before a request asks: what is in storage to host, and all of it on to
    /// a device, a quarter of that at a time.
    Prefetch {
        /// On what.
        target: Target,
        /// To whose device; `None` is to host.
        replica: Option<ReplicaId>,
    },
    /// Free the device copy, keep the bytes below.
    Demote {
        /// On what.
        target: Target,
    },
    /// Give up a pin and let the pages go first.
    Release {
        /// On what.
        target: Target,
    },
}

impl Action {
    /// What it acts on.
    pub const fn target(&self) -> &Target {
        match self {
            Self::Pin { target, .. }
            | Self::Retain { target, .. }
            | Self::Prefetch { target, .. }
            | Self::Demote { target }
            | Self::Release { target } => target,
        }
    }

    /// The same verb on something else.
    #[must_use]
    pub fn on(&self, target: Target) -> Self {
        match *self {
            Self::Pin { ttl, .. } => Self::Pin { target, ttl },
            Self::Retain {
                priority, seconds, ..
            } => Self::Retain {
                target,
                priority,
                seconds,
            },
            Self::Prefetch { replica, .. } => Self::Prefetch { target, replica },
            Self::Demote { .. } => Self::Demote { target },
            Self::Release { .. } => Self::Release { target },
        }
    }
}

/// Why a verb was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ActReason {
    /// The verb or its target is not built into this version.
    Unsupported,
    /// A lifetime of 0 seconds.
    ZeroTtl,
    /// The budget for it is used up.
    Budget,
}

/// The answer to a verb.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Outcome {
    /// Done for all pages of the target.
    Accepted {
        /// How many.
        pages: u32,
    },
    /// Done for a leading part of the target.
    Clipped {
        /// Pages it was done for.
        pages: u32,
        /// Pages asked for.
        asked_pages: u32,
    },
    /// Under way; it takes effect when copies are done.
    Deferred {
        /// Pages on their way.
        pages: u32,
    },
    /// Not done.
    Rejected(ActReason),
    /// Nothing of the target is cached.
    Missing,
}
