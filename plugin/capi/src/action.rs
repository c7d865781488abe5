//! Verbs on cached content: pin, retain, prefetch, demote, release.

use rootstock::radix::{ActReason, Action, NamespaceId, Outcome, Target, TenantId, Ttl};

use crate::args::{self, Host};
use crate::cache::Cache;
use crate::core::Core;
use crate::handle::{self, Handle};
use crate::status::{Failure, RootstockStatus};

/// What a verb does.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RootstockVerb {
    /// Keep the bytes for `seconds`: under pressure they demote, they are not dropped.
    Pin = 0,
    /// Raise the importance to `priority`, until `seconds` of idleness have passed (0: for good).
    Retain = 1,
    /// Bring lower tiers up to `replica` before a request asks.
    Prefetch = 2,
    /// Free the device copy, keep the bytes below.
    Demote = 3,
    /// Give up a pin and let the pages go first.
    Release = 4,
}

/// A verb on a prefix.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RootstockAction {
    /// sizeof(RootstockAction).
    pub struct_size: u32,
    /// A RootstockVerb.
    pub verb: u32,
    /// Who asks.
    pub tenant: u32,
    /// Importance, for retain.
    pub priority: i32,
    /// Seconds, for pin and retain.
    pub seconds: u64,
    /// For prefetch.
    pub replica: u32,
    /// Namespace of the prefix.
    pub namespace_id: u64,
    /// Its tokens; a last partial page is left out.
    pub tokens: *const u32,
    /// How many.
    pub length: usize,
}

/// How a verb was answered.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RootstockOutcomeKind {
    /// Done for all pages.
    Accepted = 0,
    /// Done for the leading `pages` of `asked_pages`.
    Clipped = 1,
    /// Under way; it takes effect when copies are done.
    Deferred = 2,
    /// Nothing of it is cached.
    Missing = 3,
}

/// The answer to a verb.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RootstockOutcome {
    /// How.
    pub kind: RootstockOutcomeKind,
    /// Pages it was done for, or that are on their way.
    pub pages: u32,
    /// Pages asked for.
    pub asked_pages: u32,
}

const PIN: u32 = RootstockVerb::Pin as u32;
const RETAIN: u32 = RootstockVerb::Retain as u32;
const PREFETCH: u32 = RootstockVerb::Prefetch as u32;
const DEMOTE: u32 = RootstockVerb::Demote as u32;
const RELEASE: u32 = RootstockVerb::Release as u32;

fn read(host: Host, action: *const RootstockAction) -> Result<(TenantId, Action), Failure> {
    let it = host.sized("action", action)?;
    let target = Target::Prefix {
        ns: NamespaceId::from_raw(it.namespace_id),
        tokens: host.slice("tokens", it.tokens, it.length)?.to_vec(),
    };
    let action = match it.verb {
        PIN => Action::Pin {
            target,
            ttl: Ttl {
                seconds: it.seconds,
                clamped: false,
            },
        },
        RETAIN => Action::Retain {
            target,
            priority: it.priority,
            seconds: (it.seconds > 0).then_some(it.seconds),
        },
        PREFETCH => Action::Prefetch {
            target,
            replica: Some(rootstock::memory::ReplicaId(
                u16::try_from(it.replica)
                    .map_err(|_| Failure::unknown("replica", it.replica.into()))?,
            )),
        },
        DEMOTE => Action::Demote { target },
        RELEASE => Action::Release { target },
        verb => {
            return Err(Failure::invalid(format!(
                "verb is {verb}, 0 to 4 (RootstockVerb) are possible"
            )));
        }
    };
    Ok((TenantId(it.tenant), action))
}

fn answer(outcome: &Outcome) -> Result<RootstockOutcome, Failure> {
    use RootstockOutcomeKind as Kind;
    let (kind, pages, asked_pages) = match *outcome {
        Outcome::Accepted { pages } => (Kind::Accepted, pages, pages),
        Outcome::Clipped { pages, asked_pages } => (Kind::Clipped, pages, asked_pages),
        Outcome::Deferred { pages } => (Kind::Deferred, pages, pages),
        Outcome::Missing => (Kind::Missing, 0, 0),
        Outcome::Rejected(reason) => {
            let why = match reason {
                ActReason::Unsupported => "this version has not this verb for this target",
                ActReason::ZeroTtl => "seconds is 0",
                ActReason::Budget => "the budget for it is used up",
                _ => "not possible",
            };
            return Err(Failure(RootstockStatus::Refused, why.to_owned()));
        }
    };
    Ok(RootstockOutcome {
        kind,
        pages,
        asked_pages,
    })
}

/// Carries out a verb; what is refused is ROOTSTOCK_STATUS_REFUSED.
///
/// # Safety
/// `cache` is live, `action` as its structure says, `outcome` has room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_act(
    cache: *mut Handle<Cache>,
    action: *const RootstockAction,
    now_ns: u64,
    outcome: *mut RootstockOutcome,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        args::check_out("outcome", outcome)?;
        let (tenant, action) = read(host, action)?;
        let done = answer(&it.cache.act(tenant, &action, now_ns))?;
        it.cache.drain_copies(&mut it.copies);
        host.write("outcome", outcome, done)
    })
}

/// Carries out a verb; what is refused is ROOTSTOCK_STATUS_REFUSED.
///
/// # Safety
/// `core` is live, `action` as its structure says, `outcome` has room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_act(
    core: *mut Handle<Core>,
    action: *const RootstockAction,
    now_ns: u64,
    outcome: *mut RootstockOutcome,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, core, |it| {
        args::check_out("outcome", outcome)?;
        let (tenant, action) = read(host, action)?;
        let done = answer(&it.core.act(tenant, &action, now_ns))?;
        host.write("outcome", outcome, done)
    })
}
