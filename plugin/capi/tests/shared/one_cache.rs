//! Calls on a cache.

use super::choices::{Choices, NO_OUTCOME, ROOM, Texts, action_of, call, fine, tokens};
use crate::cache::{RootstockFound, RootstockPrompt};
use crate::handle::Handle;
use crate::pages::{RootstockCopy, RootstockSpan, RootstockSwap, RootstockSwaps};
use crate::{action, cache, pages};

/// A cache, and what it gave out.
pub(super) struct OneCache {
    pub(super) handle: *mut Handle<cache::Cache>,
    pub(super) namespaces: Vec<u64>,
    pub(super) leases: Vec<u64>,
    pub(super) allocations: Vec<u64>,
    pub(super) copies: Vec<u64>,
}

pub(super) fn namespace(
    choices: &mut Choices<'_>,
    it: *mut Handle<cache::Cache>,
    known: &mut Vec<u64>,
) {
    let texts = Texts::choose(choices);
    let mut namespace = texts.namespace(choices);
    let (mut id, from) = (0, choices.pointer(&mut namespace));
    let to = choices.pointer(&mut id);
    if fine(call!(cache::rootstock_cache_namespace, it, from, to)) {
        known.push(id);
    }
}

impl OneCache {
    pub(super) fn question(&self, choices: &mut Choices<'_>, tokens: &[u32]) -> RootstockPrompt {
        let (pointer, length) = choices.slice(tokens);
        RootstockPrompt {
            struct_size: choices.size::<RootstockPrompt>(),
            replica: u32::from(choices.byte()) % 3,
            namespace_id: choices.one_of(&self.namespaces),
            tokens: pointer,
            length,
            max_tokens: [u32::MAX, 0, 5][choices.below(3)],
        }
    }

    pub(super) fn prompt(&mut self, choices: &mut Choices<'_>, now_ns: u64) {
        let tokens = tokens(choices);
        let mut prompt = self.question(choices, &tokens);
        let (mut found, mut lease) = (RootstockFound::default(), 0);
        if choices.rarely() {
            let to = choices.pointer(&mut found);
            fine(call!(
                cache::rootstock_cache_probe,
                self.handle,
                prompt.namespace_id,
                prompt.tokens,
                prompt.length,
                prompt.replica,
                to,
            ));
            return;
        }
        let from = choices.pointer(&mut prompt);
        let (to, told) = (choices.pointer(&mut lease), choices.pointer(&mut found));
        if fine(call!(
            cache::rootstock_cache_match,
            self.handle,
            from,
            now_ns,
            to,
            told
        )) {
            self.leases.push(lease);
        }
    }

    pub(super) fn allocate(&mut self, choices: &mut Choices<'_>, now_ns: u64) {
        let (replica, count) = (u32::from(choices.byte()) % 3, u32::from(choices.byte()) % 8);
        let mut ids = [0_u32; ROOM];
        let (to, _) = choices.slice(&ids);
        let to = if to.is_null() || !to.is_aligned() {
            to.cast_mut()
        } else {
            ids.as_mut_ptr()
        };
        let mut allocation = 0;
        let id = choices.pointer(&mut allocation);
        let made = call!(
            pages::rootstock_cache_allocate,
            self.handle,
            replica,
            count,
            now_ns,
            to,
            id,
        );
        if fine(made) {
            self.allocations.push(allocation);
            assert!(ids[..count as usize].iter().all(|id| *id > 0), "{ids:?}");
        }
    }

    pub(super) fn extend(&mut self, choices: &mut Choices<'_>, now_ns: u64) {
        let tokens = tokens(choices);
        let (pointer, length) = choices.slice(&tokens);
        let mut span = RootstockSpan {
            struct_size: choices.size::<RootstockSpan>(),
            lease: choices.one_of(&self.leases),
            allocation: choices.one_of(&self.allocations),
            priority: i32::from(choices.byte()) - 128,
            retention_s: u32::from(choices.byte()),
            keep_duplicates: u32::from(choices.rarely()),
            tokens: pointer,
            length: length & !15,
            busy_until: u64::from(choices.byte() % 4),
        };
        let mut entries = [RootstockSwap { index: 0, page: 0 }; ROOM];
        let mut swaps = RootstockSwaps {
            entries: entries.as_mut_ptr(),
            capacity: if choices.rarely() { 0 } else { ROOM },
            count: 0,
        };
        let (from, to) = (choices.pointer(&mut span), choices.pointer(&mut swaps));
        if fine(call!(
            pages::rootstock_cache_extend,
            self.handle,
            from,
            now_ns,
            to
        )) {
            assert!(swaps.count <= swaps.capacity);
        }
    }

    pub(super) fn end(&mut self, choices: &mut Choices<'_>, now_ns: u64) {
        let (lease, fate) = (choices.one_of(&self.leases), u32::from(choices.byte()) % 5);
        if fine(call!(
            cache::rootstock_cache_end,
            self.handle,
            lease,
            fate,
            now_ns
        )) {
            self.leases.retain(|known| *known != lease);
        }
    }

    pub(super) fn lease(&mut self, choices: &mut Choices<'_>, now_ns: u64) {
        let lease = choices.one_of(&self.leases);
        let (mut ids, mut length) = ([0_u32; ROOM], 0);
        let capacity = [ROOM, 0, 1][choices.below(3)];
        match choices.below(3) {
            0 => {
                let (to, told) = (ids.as_mut_ptr(), choices.pointer(&mut length));
                let handle = self.handle;
                fine(call!(
                    pages::rootstock_lease_pages,
                    handle,
                    lease,
                    to,
                    capacity,
                    told
                ));
            }
            1 => {
                let tokens = tokens(choices);
                let mut prompt = self.question(choices, &tokens);
                let (mut gained, from) = (0, choices.pointer(&mut prompt));
                let to = choices.pointer(&mut gained);
                let handle = self.handle;
                fine(call!(
                    pages::rootstock_cache_grow,
                    handle,
                    lease,
                    from,
                    now_ns,
                    to
                ));
            }
            _ => {
                let (mut copy, pages) = (0, u32::from(choices.byte()) % 5);
                let to = choices.pointer(&mut copy);
                let handle = self.handle;
                fine(call!(
                    pages::rootstock_cache_promote,
                    handle,
                    lease,
                    pages,
                    now_ns,
                    to
                ));
            }
        }
    }

    pub(super) fn copies(&mut self, choices: &mut Choices<'_>, now_ns: u64) {
        if choices.below(2) == 0 && !self.copies.is_empty() {
            let copy = choices.one_of(&self.copies);
            let done = choices.below(4) > 0;
            fine(call!(
                cache::rootstock_cache_copy_done,
                self.handle,
                copy,
                done,
                now_ns
            ));
            if !choices.rarely() {
                self.copies.retain(|known| *known != copy);
            }
            return;
        }
        let mut copy = RootstockCopy::default();
        let (mut from, mut to) = ([0_u32; ROOM], [0_u32; ROOM]);
        let told = choices.pointer(&mut copy);
        let capacity = if choices.rarely() { 0 } else { ROOM };
        let (from, to) = (from.as_mut_ptr(), to.as_mut_ptr());
        if fine(call!(
            pages::rootstock_cache_next_copy,
            self.handle,
            told,
            from,
            to,
            capacity
        )) && copy.id > 0
        {
            self.copies.push(copy.id);
        }
    }

    pub(super) fn act(&mut self, choices: &mut Choices<'_>, now_ns: u64) {
        let tokens = tokens(choices);
        let mut action = action_of(choices, &self.namespaces, &tokens);
        let mut outcome = NO_OUTCOME;
        let (from, to) = (choices.pointer(&mut action), choices.pointer(&mut outcome));
        fine(call!(
            action::rootstock_cache_act,
            self.handle,
            from,
            now_ns,
            to
        ));
    }

    pub(super) fn release(&mut self, choices: &mut Choices<'_>) {
        let allocation = choices.one_of(&self.allocations);
        let busy = u64::from(choices.byte() % 4);
        fine(call!(
            pages::rootstock_cache_release,
            self.handle,
            allocation,
            busy
        ));
        self.allocations.retain(|known| *known != allocation);
    }

    pub(super) fn upkeep(&mut self, choices: &mut Choices<'_>, now_ns: u64) {
        let (replica, number) = (u32::from(choices.byte()) % 3, choices.byte());
        let handle = self.handle;
        match choices.below(5) {
            0 => {
                let step = u64::from(number % 8);
                fine(call!(
                    cache::rootstock_cache_step_done,
                    handle,
                    replica,
                    step
                ));
            }
            1 => {
                fine(call!(cache::rootstock_cache_tick, handle, now_ns));
            }
            2 => {
                fine(call!(cache::rootstock_cache_flush, handle, now_ns));
            }
            3 => {
                let (count, none) = (u32::from(number), std::ptr::null_mut());
                let mut freed = 0;
                let to = choices.pointer(&mut freed);
                let (now, room) = (now_ns, pages::rootstock_cache_make_room);
                fine(call!(room, handle, replica, count, now, to, none));
            }
            _ => {
                let (mut text, mut length) = ([0_u8; 4096], 0);
                let (capacity, to) = (usize::from(number) * 16, text.as_mut_ptr());
                let told = choices.pointer(&mut length);
                fine(call!(
                    cache::rootstock_cache_stats,
                    handle,
                    to.cast(),
                    capacity,
                    told
                ));
            }
        }
    }
}
