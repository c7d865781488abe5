//! Pages of a cache: what a lease covers, what a host allocates and gives back, copies between
//! tiers.

use rootstock::memory::{CopyClass, CopyPlan, PageId, Pages, StepId, TierId};
use rootstock::radix::{ContextKind, Dedup, Key, NamespaceId, SpanMeta};

use crate::args::{self, Host};
use crate::cache::{Cache, RootstockPrompt, replica};
use crate::handle::{self, Handle};
use crate::status::{Failure, RootstockStatus};

/// The ids of the device pages of a lease, in the order of the prompt.
///
/// # Safety
/// `cache` is live, `pages` has room for `capacity` ids, `length` for one number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_lease_pages(
    cache: *mut Handle<Cache>,
    lease: u64,
    pages: *mut u32,
    capacity: usize,
    length: *mut usize,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        let leased = it.leases.get(&lease);
        let leased = leased.ok_or_else(|| Failure::unknown("lease", lease))?;
        let mut ids = Vec::new();
        it.cache.pages(leased, &mut ids);
        let ids: Vec<u32> = ids.iter().map(|id| id.get()).collect();
        host.copy_out(&ids, pages, capacity, length)
    })
}

/// Allocates `count` device pages, all or none (ROOTSTOCK_STATUS_SHORT), evicting what is worth
/// least.
///
/// The copies that this begins are fetched by rootstock_cache_next_copy.
///
/// # Safety
/// `cache` is live, `pages` has room for `count` ids, `allocation` for one number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_allocate(
    cache: *mut Handle<Cache>,
    replica_id: u32,
    count: u32,
    now_ns: u64,
    pages: *mut u32,
    allocation: *mut u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        args::check_out("allocation", allocation)?;
        let tier = TierId::Device(replica(&it.cache, replica_id)?);
        let Some(out) = host.slice_out(pages, count as usize) else {
            return Err(Failure::invalid(
                "pages is null or not aligned, or count is 0",
            ));
        };
        let reserved = it.cache.reserve(tier, count, now_ns);
        let (mut room, copies) =
            reserved.map_err(|short| Failure(RootstockStatus::Short, short.to_string()))?;
        it.copies.extend(copies);
        let got = it.cache.acquire(&mut room, count);
        it.cache.cancel(room);
        for (slot, id) in out.iter_mut().zip(got.ids()) {
            *slot = id.get();
        }
        let id = it.fresh_id();
        it.allocations.insert(id, got);
        host.write("allocation", allocation, id)
    })
}

/// Gives an allocation back. `busy_until` is the last step that may still touch its pages, 0 for
/// none.
///
/// # Safety
/// `cache` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_release(
    cache: *mut Handle<Cache>,
    allocation: u64,
    busy_until: u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        let pages = it.allocations.remove(&allocation);
        let pages = pages.ok_or_else(|| Failure::unknown("allocation", allocation))?;
        it.cache.release(pages, step(busy_until));
        Ok(())
    })
}

fn step(id: u64) -> Option<StepId> {
    (id > 0).then_some(StepId(id))
}

/// Makes at least `count` pages of a replica's device free, all or none.
///
/// # Safety
/// `cache` is live; `freed` and `pins_yielded` are null or have room for one number each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_make_room(
    cache: *mut Handle<Cache>,
    replica_id: u32,
    count: u32,
    now_ns: u64,
    freed: *mut u32,
    pins_yielded: *mut u32,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        let tier = TierId::Device(replica(&it.cache, replica_id)?);
        let made = it.cache.make_room(tier, count, now_ns);
        let room = made.map_err(|short| Failure(RootstockStatus::Short, short.to_string()))?;
        it.copies.extend(room.copies);
        if !freed.is_null() {
            host.write("freed", freed, room.freed_pages)?;
        }
        if !pins_yielded.is_null() {
            host.write("pins_yielded", pins_yielded, room.pins_yielded)?;
        }
        Ok(())
    })
}

/// Complete pages that a host has computed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RootstockSpan {
    /// sizeof(RootstockSpan).
    pub struct_size: u32,
    /// Whose pages.
    pub lease: u64,
    /// Where they were allocated.
    pub allocation: u64,
    /// Importance; higher stays longer.
    pub priority: i32,
    /// Seconds of idleness after which `priority` holds no longer; 0 is never.
    pub retention_s: u32,
    /// 1: a page that the cache already has stays the host's own (its block tables cannot
    /// change).
    pub keep_duplicates: u32,
    /// The tokens that follow the lease: as many as fill whole pages.
    pub tokens: *const u32,
    /// How many tokens.
    pub length: usize,
    /// Last step that may still touch the pages, 0 for none.
    pub busy_until: u64,
}

/// An entry of the host's block table that changes: the cache already had this page.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RootstockSwap {
    /// Index of the page in the prompt.
    pub index: u32,
    /// The page to use from now on.
    pub page: u32,
}

/// Room for swaps, and how many there are.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RootstockSwaps {
    /// Room for `capacity` entries.
    pub entries: *mut RootstockSwap,
    /// At least the number of pages of the span.
    pub capacity: usize,
    /// Set by the call.
    pub count: usize,
}

/// Makes computed pages matchable: the first pages of the allocation, as many as the span fills,
/// go to the lease. The host then changes its block table as `swaps` says; the duplicates are
/// released.
///
/// # Safety
/// `cache` is live, `span` as its structure says, `swaps` is initialised and has the room it
/// says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_extend(
    cache: *mut Handle<Cache>,
    span: *const RootstockSpan,
    now_ns: u64,
    swaps: *mut RootstockSwaps,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        let Some([room]) = host.slice_out(swaps, 1) else {
            return Err(Failure::invalid("swaps is null or not aligned"));
        };
        let span = host.sized("span", span)?;
        let (lease, allocation) = (span.lease, span.allocation);
        let tokens = host.slice("tokens", span.tokens, span.length)?;
        let meta = SpanMeta {
            kind: ContextKind::Unknown,
            priority: span.priority,
            retention_s: (span.retention_s > 0).then_some(span.retention_s),
            dedup: if span.keep_duplicates == 0 {
                Dedup::Swap
            } else {
                Dedup::Keep
            },
            busy_until: step(span.busy_until),
        };
        if meta.dedup == Dedup::Swap {
            args::check_out("swaps.entries", room.entries)?;
        }
        let pages = take(it, lease, allocation, tokens.len())?;
        if pages.len() > room.capacity {
            let (needed, capacity) = (pages.len(), room.capacity);
            put_back(it, allocation, pages);
            return Err(Failure(
                RootstockStatus::TooSmall,
                format!("swaps has room for {capacity}, {needed} may be needed"),
            ));
        }
        let leased = it.leases.get_mut(&lease);
        let leased = leased.ok_or_else(|| Failure::unknown("lease", lease))?;
        let extended = it.cache.extend(leased, tokens, pages, &meta, now_ns);
        it.cache.drain_copies(&mut it.copies);
        let swapped: Vec<RootstockSwap> = extended
            .swapped
            .iter()
            .map(|&(index, page)| RootstockSwap {
                index,
                page: page.get(),
            })
            .collect();
        host.copy_out(&swapped, room.entries, room.capacity, &raw mut room.count)
    })
}

/// Takes the pages of a span from its allocation, or changes nothing.
fn take(it: &mut Cache, lease: u64, allocation: u64, tokens: usize) -> Result<Pages, Failure> {
    let device = TierId::Device(it.lease(lease)?.replica());
    let page_tokens = it.page_tokens();
    if tokens == 0 || !tokens.is_multiple_of(page_tokens) {
        return Err(Failure::invalid(format!(
            "the span has {tokens} tokens; whole pages of {page_tokens} are needed"
        )));
    }
    let mut held = it
        .allocations
        .remove(&allocation)
        .ok_or_else(|| Failure::unknown("allocation", allocation))?;
    let wanted = tokens / page_tokens;
    if held.len() < wanted {
        let text = format!(
            "the span fills {wanted} pages, the allocation has {}",
            held.len()
        );
        it.allocations.insert(allocation, held);
        return Err(Failure::invalid(text));
    }
    if held.tier() != device {
        let (found, wanted) = (tier_number(held.tier()), tier_number(device));
        it.allocations.insert(allocation, held);
        return Err(Failure::invalid(format!(
            "the allocation is on replica {found}, the lease on replica {wanted}; allocate there"
        )));
    }
    let rest = held.split_off(wanted);
    if rest.is_empty() {
        rest.disband();
    } else {
        it.allocations.insert(allocation, rest);
    }
    Ok(held)
}

fn put_back(it: &mut Cache, allocation: u64, mut pages: Pages) {
    if let Some(rest) = it.allocations.remove(&allocation) {
        pages.merge(rest);
    }
    it.allocations.insert(allocation, pages);
}

/// Extends a lease over what others have made matchable since; `gained` is in tokens.
///
/// # Safety
/// `cache` is live, `prompt` as its structure says, `gained` has room for one number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_grow(
    cache: *mut Handle<Cache>,
    lease: u64,
    prompt: *const RootstockPrompt,
    now_ns: u64,
    gained: *mut u32,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        args::check_out("gained", gained)?;
        let prompt = host.sized("prompt", prompt)?;
        let key = Key {
            ns: NamespaceId::from_raw(prompt.namespace_id),
            tokens: host.slice("tokens", prompt.tokens, prompt.length)?,
        };
        let leased = it.leases.get_mut(&lease);
        let leased = leased.ok_or_else(|| Failure::unknown("lease", lease))?;
        let more = it.cache.grow(leased, key, prompt.max_tokens, now_ns);
        host.write("gained", gained, more)
    })
}

/// Begins to copy up `pages` pages that a match found on host after the lease. Gives the copy's
/// id; 0 when there is nothing to copy. After its acknowledgement rootstock_cache_grow takes
/// them up.
///
/// # Safety
/// `cache` is live, `copy` has room for one number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_promote(
    cache: *mut Handle<Cache>,
    lease: u64,
    pages: u32,
    now_ns: u64,
    copy: *mut u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        args::check_out("copy", copy)?;
        let tier = TierId::Device(it.lease(lease)?.replica());
        let reserved = it.cache.reserve(tier, pages, now_ns);
        let (mut room, copies) =
            reserved.map_err(|short| Failure(RootstockStatus::Short, short.to_string()))?;
        it.copies.extend(copies);
        let leased = it.leases.get_mut(&lease);
        let leased = leased.ok_or_else(|| Failure::unknown("lease", lease))?;
        let plan = it.cache.promote(leased, &mut room, now_ns);
        it.cache.cancel(room);
        let id = plan.as_ref().map_or(0, |plan| plan.id.0);
        it.copies.extend(plan);
        host.write("copy", copy, id)
    })
}

/// A copy to carry out and then to acknowledge, once, by rootstock_cache_copy_done or
/// rootstock_core_copy_done.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RootstockCopy {
    /// Id.
    pub id: u64,
    /// From which tier: a replica's number for its device, 65536 for host, 65537 for storage.
    pub from_tier: u32,
    /// To which.
    pub to_tier: u32,
    /// First layer.
    pub first_layer: u32,
    /// Layers.
    pub layers: u32,
    /// Pages.
    pub count: u32,
    /// 1: a request waits for it.
    pub urgent: u32,
}

/// Host memory, as a tier of a RootstockCopy.
pub const ROOTSTOCK_TIER_HOST: u32 = 65536;
/// Storage, as a tier of a RootstockCopy.
pub const ROOTSTOCK_TIER_STORAGE: u32 = 65537;

fn tier_number(tier: TierId) -> u32 {
    match tier {
        TierId::Device(replica) => replica.0.into(),
        TierId::Host => ROOTSTOCK_TIER_HOST,
        TierId::Storage => ROOTSTOCK_TIER_STORAGE,
    }
}

/// A plan as the host sees it.
pub(crate) fn copy_of(plan: &CopyPlan) -> RootstockCopy {
    RootstockCopy {
        id: plan.id.0,
        from_tier: tier_number(plan.from.0),
        to_tier: tier_number(plan.to.0),
        first_layer: plan.layers.start.into(),
        layers: u32::from(plan.layers.end - plan.layers.start),
        count: u32::try_from(plan.to.1.len()).unwrap_or(u32::MAX),
        urgent: u32::from(plan.class == CopyClass::Promote),
    }
}

/// The next copy to carry out. `from` and `to` get its page ids; with too little room nothing
/// changes and `copy->count` says how much is needed. `copy->id` is 0 when there is none.
///
/// # Safety
/// `cache` is live, `copy` has room, `from` and `to` have room for `capacity` ids each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_next_copy(
    cache: *mut Handle<Cache>,
    copy: *mut RootstockCopy,
    from: *mut u32,
    to: *mut u32,
    capacity: usize,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        it.cache.drain_copies(&mut it.copies);
        let Some(plan) = it.copies.first() else {
            return host.write("copy", copy, RootstockCopy::default());
        };
        host.write("copy", copy, copy_of(plan))?;
        let ids = |pages: &[PageId]| pages.iter().map(|id| id.get()).collect::<Vec<u32>>();
        let mut length = 0;
        host.copy_out(&ids(&plan.from.1), from, capacity, &raw mut length)?;
        host.copy_out(&ids(&plan.to.1), to, capacity, &raw mut length)?;
        it.copies.remove(0);
        Ok(())
    })
}
