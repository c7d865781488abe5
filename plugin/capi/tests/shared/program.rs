//! Programs of C calls, made from bytes: any order, null and unaligned pointers, lengths that
//! cannot be, texts that are no UTF-8, ids that were never given out. What the header lets a host
//! get wrong must be an answer: nothing panics, and after every call the recounts add up.
//!
//! What the header makes the host's promise is kept: handles are live or null, and what a length
//! says is there. Included by the fuzz target and by a test, whose crate roots have the library's
//! modules.

mod choices;
mod one_cache;
mod one_core;

use std::ffi::c_char;

use crate::handle::Handle;
use crate::plan::Plan;
use crate::status::RootstockStatus;
use crate::{cache, core, plan};
use choices::{Choices, call, fine};
use one_cache::{OneCache, namespace};
use one_core::OneCore;

/// Handles of a kind, at most.
const HANDLES: usize = 2;

/// All that a program made.
#[derive(Default)]
struct World {
    caches: Vec<OneCache>,
    cores: Vec<OneCore>,
    plans: Vec<*mut Handle<Plan>>,
    now_ns: u64,
}

/// Runs a program to its end and frees all.
pub(crate) fn run(bytes: &[u8]) {
    let mut choices = Choices(bytes);
    let mut world = World::default();
    while !choices.0.is_empty() {
        world.now_ns = match choices.byte() {
            0 => world.now_ns / 2,
            1 => world.now_ns.saturating_add(1 << 40),
            step => world.now_ns.saturating_add(u64::from(step) << 20),
        };
        match choices.below(8) {
            0 => world.make(&mut choices),
            1..=4 => world.use_cache(&mut choices),
            _ => world.use_core(&mut choices),
        }
        world.check();
    }
    for plan in world.plans {
        call!(plan::rootstock_plan_free, plan);
    }
    for it in world.caches {
        call!(cache::rootstock_cache_free, it.handle);
    }
    for it in world.cores {
        call!(core::rootstock_core_free, it.handle);
    }
}

fn config(choices: &mut Choices<'_>, core: bool) -> Vec<u8> {
    if choices.rarely() {
        return choices.text();
    }
    let page = [0_u32, 1, 2, 4, 16][choices.below(5)];
    let (first, second) = (choices.below(12), choices.below(6));
    let devices = match choices.below(3) {
        0 => format!("{first}, {second}"),
        _ => first.to_string(),
    };
    let policy = ["lru", "agent", "slru", "priority", "none"][choices.below(5)];
    let host = choices.below(9);
    let cache = format!(
        "{{\"page_tokens\": {page}, \"device_pages\": [{devices}], \"host_pages\": {host}, \
         \"policy\": {policy:?}}}"
    );
    let text = match core {
        false => cache,
        true => format!(
            "{{\"cache\": {cache}, \"scheduler\": {{\"max_running\": {}, \"step_tokens\": {}}}}}",
            choices.below(4),
            choices.below(20)
        ),
    };
    text.into_bytes()
}

impl World {
    fn make(&mut self, choices: &mut Choices<'_>) {
        let is_core = choices.below(2) == 1;
        let text = config(choices, is_core);
        let (pointer, length) = choices.slice(&text);
        let pointer = pointer.cast::<c_char>();
        if is_core {
            if self.cores.len() == HANDLES {
                let old = self.cores.remove(0);
                call!(core::rootstock_core_free, old.handle);
            }
            let mut handle = std::ptr::null_mut();
            let to = choices.pointer(&mut handle);
            if fine(call!(core::rootstock_core_new, pointer, length, to)) {
                self.cores.push(OneCore {
                    handle,
                    namespaces: Vec::new(),
                    requests: Vec::new(),
                    copies: Vec::new(),
                    steps: Vec::new(),
                });
            }
        } else {
            if self.caches.len() == HANDLES {
                let old = self.caches.remove(0);
                call!(cache::rootstock_cache_free, old.handle);
            }
            let mut handle = std::ptr::null_mut();
            let to = choices.pointer(&mut handle);
            if fine(call!(cache::rootstock_cache_new, pointer, length, to)) {
                self.caches.push(OneCache {
                    handle,
                    namespaces: Vec::new(),
                    leases: Vec::new(),
                    allocations: Vec::new(),
                    copies: Vec::new(),
                });
            }
        }
    }

    fn check(&self) {
        for it in &self.caches {
            fine(call!(cache::rootstock_cache_check, it.handle));
        }
        for it in &self.cores {
            fine(call!(core::rootstock_core_check, it.handle));
        }
    }

    fn use_cache(&mut self, choices: &mut Choices<'_>) {
        let at = choices.below(self.caches.len());
        let now_ns = self.now_ns;
        match self.caches.get_mut(at) {
            Some(it) => match choices.below(16) {
                0 => namespace(choices, it.handle, &mut it.namespaces),
                1 | 2 => it.prompt(choices, now_ns),
                3..=5 => it.allocate(choices, now_ns),
                6..=8 => it.extend(choices, now_ns),
                9 => it.end(choices, now_ns),
                10 => it.copies(choices, now_ns),
                11 => it.act(choices, now_ns),
                12 => it.lease(choices, now_ns),
                13 => it.release(choices),
                _ => it.upkeep(choices, now_ns),
            },
            None => {
                let null = std::ptr::null_mut();
                let status = call!(cache::rootstock_cache_tick, null, now_ns);
                assert_eq!(status, RootstockStatus::Invalid);
                call!(cache::rootstock_cache_free, null);
            }
        }
    }

    fn use_core(&mut self, choices: &mut Choices<'_>) {
        let at = choices.below(self.cores.len());
        let now_ns = self.now_ns;
        match self.cores.get_mut(at) {
            Some(it) => match choices.below(16) {
                0 => it.namespace(choices),
                1..=4 => it.add(choices, now_ns),
                5..=7 => it.schedule(choices, now_ns, &mut self.plans),
                8..=10 => it.step(choices, now_ns),
                11 => it.events(choices),
                12 => it.end(choices, now_ns),
                13 => it.act(choices, now_ns),
                _ => it.upkeep(choices, now_ns),
            },
            None => {
                let null = std::ptr::null_mut();
                let status = call!(core::rootstock_core_tick, null, now_ns);
                assert_eq!(status, RootstockStatus::Invalid);
                call!(core::rootstock_core_free, null);
            }
        }
    }
}
