//! Calls on a core.

use super::choices::{Choices, NO_OUTCOME, ROOM, Texts, action_of, call, fine, tokens};
use crate::core::RootstockRowOut;
use crate::handle::Handle;
use crate::pages::RootstockCopy;
use crate::plan::{Plan, RootstockPlanView};
use crate::request::RootstockRequest;
use crate::{action, core, emit, plan};

/// Plans that are out, at most.
const PLANS: usize = 8;

/// A core, and what it gave out.
pub(super) struct OneCore {
    pub(super) handle: *mut Handle<core::Core>,
    pub(super) namespaces: Vec<u64>,
    pub(super) requests: Vec<u64>,
    pub(super) copies: Vec<u64>,
    /// Replica, step, and whether each row draws.
    pub(super) steps: Vec<(u32, u64, Vec<bool>)>,
}

impl OneCore {
    pub(super) fn namespace(&mut self, choices: &mut Choices<'_>) {
        let texts = Texts::choose(choices);
        let mut namespace = texts.namespace(choices);
        let (mut id, from) = (0, choices.pointer(&mut namespace));
        let to = choices.pointer(&mut id);
        if fine(call!(core::rootstock_core_namespace, self.handle, from, to)) {
            self.namespaces.push(id);
        }
    }

    pub(super) fn add(&mut self, choices: &mut Choices<'_>, now_ns: u64) {
        let (tokens, stops) = (tokens(choices), [0_u32, 1]);
        let nvext = match choices.below(4) {
            0 => choices.text(),
            1 => br#"{"agent_hints": {"priority": 5, "osl": 3}}"#.to_vec(),
            2 => br#"{"cache_control": {"type": "ephemeral", "ttl": "5m"}}"#.to_vec(),
            _ => Vec::new(),
        };
        let (pointer, length) = choices.slice(&tokens);
        let stops = &stops[..choices.below(3)];
        let (stop_tokens, stop_count) = choices.slice(stops);
        let (text, text_length) = choices.slice(&nvext);
        let odd = [0.0, 1.0, 0.5, f32::NAN, -1.0, f32::INFINITY];
        let mut request = RootstockRequest {
            struct_size: choices.size::<RootstockRequest>(),
            tenant: u32::from(choices.byte()) % 2,
            namespace_id: choices.one_of(&self.namespaces),
            tokens: pointer,
            length,
            max_tokens: [1, 4, 9, 0, u32::MAX][choices.below(5)],
            min_tokens: u32::from(choices.byte()) % 3,
            stop_tokens,
            stop_count,
            ignore_eos: u32::from(choices.rarely()),
            speculative: u32::from(choices.rarely()),
            temperature: odd[choices.below(6)],
            top_p: odd[choices.below(6)],
            min_p: odd[choices.below(6)],
            top_k: u32::from(choices.byte()) % 3,
            seed: choices.byte().into(),
            nvext: text.cast(),
            nvext_length: text_length,
            deadline_ns: [0, now_ns + (1 << 30), 1][choices.below(3)],
            label: choices.byte().into(),
        };
        let (mut id, mut retry) = (0, 0);
        let (from, to) = (choices.pointer(&mut request), choices.pointer(&mut id));
        let told = choices.pointer(&mut retry);
        if fine(call!(
            core::rootstock_core_add,
            self.handle,
            from,
            now_ns,
            to,
            told
        )) {
            self.requests.push(id);
        }
    }

    pub(super) fn schedule(
        &mut self,
        choices: &mut Choices<'_>,
        now_ns: u64,
        plans: &mut Vec<*mut Handle<Plan>>,
    ) {
        let (replica, mut plan) = (u32::from(choices.byte()) % 3, std::ptr::null_mut());
        let to = choices.pointer(&mut plan);
        let made = call!(
            core::rootstock_core_schedule,
            self.handle,
            replica,
            now_ns,
            to
        );
        if !fine(made) || plan.is_null() {
            return;
        }
        let mut view = std::mem::MaybeUninit::<RootstockPlanView>::uninit();
        assert!(fine(call!(
            plan::rootstock_plan_view,
            plan,
            view.as_mut_ptr()
        )));
        // SAFETY: the call above wrote it.
        let view = unsafe { view.assume_init() };
        let rows: &[_] = match view.row_count {
            0 => &[],
            // SAFETY: the plan lives, and its view says so many rows.
            count => unsafe { std::slice::from_raw_parts(view.rows, count) },
        };
        for row in rows {
            assert!(row.first_page as usize + row.pages as usize <= view.page_count);
        }
        let samples = rows.iter().map(|row| row.sample == 1).collect();
        self.steps.push((replica, view.step, samples));
        let copies: &[RootstockCopy] = match view.copy_count {
            0 => &[],
            // SAFETY: as above, of copies.
            count => unsafe { std::slice::from_raw_parts(view.copies, count) },
        };
        self.copies.extend(copies.iter().map(|copy| copy.id));
        plans.push(plan);
        if plans.len() > PLANS {
            call!(plan::rootstock_plan_free, plans.remove(0));
        }
    }

    pub(super) fn step(&mut self, choices: &mut Choices<'_>, now_ns: u64) {
        let (handle, odd) = (self.handle, choices.rarely());
        if let Some(copy) = self.copies.pop() {
            let done = choices.below(4) > 0;
            fine(call!(
                core::rootstock_core_copy_done,
                handle,
                copy,
                done,
                now_ns
            ));
        }
        let known = if odd || self.steps.is_empty() {
            let step = u64::from(choices.byte());
            (
                u32::from(choices.byte()) % 3,
                step,
                vec![true; choices.below(3)],
            )
        } else {
            self.steps.remove(0)
        };
        let (replica, step, rows) = known;
        if choices.rarely() {
            fine(call!(
                core::rootstock_core_fail_step,
                handle,
                replica,
                step,
                now_ns
            ));
            return;
        }
        let drawn = [u32::from(choices.byte()) % 3; 2];
        let row = |draws: &bool| RootstockRowOut {
            tokens: drawn.as_ptr(),
            length: usize::from(*draws),
        };
        let mut rows: Vec<RootstockRowOut> = rows.iter().map(row).collect();
        if choices.rarely() {
            rows.pop();
        }
        if choices.rarely()
            && let Some(row) = rows.first_mut()
        {
            row.length = choices.below(3);
        }
        let (pointer, count) = choices.slice(&rows);
        let complete = core::rootstock_core_complete;
        fine(call!(
            complete, handle, replica, step, pointer, count, now_ns
        ));
    }

    pub(super) fn events(&mut self, choices: &mut Choices<'_>) {
        let mut event = std::mem::MaybeUninit::<emit::RootstockEvent>::uninit();
        let mut tokens = [0_u32; ROOM];
        let capacity = if choices.rarely() { 0 } else { ROOM };
        let (to, room) = (event.as_mut_ptr(), tokens.as_mut_ptr());
        fine(call!(
            emit::rootstock_core_next_event,
            self.handle,
            to,
            room,
            capacity
        ));
        let null = std::ptr::null_mut();
        fine(call!(
            emit::rootstock_core_next_event,
            self.handle,
            null,
            room,
            capacity
        ));
    }

    pub(super) fn end(&mut self, choices: &mut Choices<'_>, now_ns: u64) {
        let (request, how) = (
            choices.one_of(&self.requests),
            u32::from(choices.byte()) % 3,
        );
        fine(call!(
            core::rootstock_core_end,
            self.handle,
            request,
            how,
            now_ns
        ));
    }

    pub(super) fn act(&mut self, choices: &mut Choices<'_>, now_ns: u64) {
        let tokens = tokens(choices);
        let mut action = action_of(choices, &self.namespaces, &tokens);
        let mut outcome = NO_OUTCOME;
        let (from, to) = (choices.pointer(&mut action), choices.pointer(&mut outcome));
        fine(call!(
            action::rootstock_core_act,
            self.handle,
            from,
            now_ns,
            to
        ));
    }

    pub(super) fn upkeep(&mut self, choices: &mut Choices<'_>, now_ns: u64) {
        let handle = self.handle;
        match choices.below(3) {
            0 => {
                fine(call!(core::rootstock_core_tick, handle, now_ns));
            }
            1 => {
                fine(call!(core::rootstock_core_flush, handle, now_ns));
            }
            _ => {
                let (mut text, mut length) = ([0_u8; 4096], 0);
                let capacity = usize::from(choices.byte()) * 16;
                let told = choices.pointer(&mut length);
                let to = text.as_mut_ptr().cast();
                fine(call!(
                    core::rootstock_core_stats,
                    handle,
                    to,
                    capacity,
                    told
                ));
            }
        }
    }
}
