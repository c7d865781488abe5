//! Depth two: cache and scheduler. Requests go in, plans come out, the host computes them.
//!
//! ```text
//! add, abort, finish   as requests come and go
//! schedule             -> a plan, or null: nothing to do until something changes
//! (the host computes)
//! complete | fail_step once per plan, and copy_done once per copy
//! next_event           until there is none
//! ```

use std::collections::VecDeque;
use std::ffi::c_char;

use rootstock::ServingCore;
use rootstock::memory::{CopyDone, CopyId, ReplicaId, StepId};
use rootstock::scheduler::{Admission, Emit, FinishReason, RequestId, RowOut, StepOutput};

use crate::args::{self, Host};
use crate::cache::{RootstockNamespace, namespace_key};
use crate::handle::{self, Handle};
use crate::plan::Plan;
use crate::request::{self, RootstockRequest};
use crate::settings;
use crate::status::{Failure, RootstockStatus};

/// Cache and schedulers. Opaque.
#[derive(Debug)]
pub struct Core {
    pub(crate) core: ServingCore,
    pub(crate) emits: VecDeque<Emit>,
    drained: Vec<Emit>,
}

impl Core {
    /// The oldest event that the host has not taken.
    pub(crate) fn next_emit(&mut self) -> Option<&Emit> {
        self.core.drain_emits(&mut self.drained);
        self.emits.extend(self.drained.drain(..));
        self.emits.front()
    }

    fn replica(&self, replica: u32) -> Result<ReplicaId, Failure> {
        let known = self.core.config().replicas();
        match u16::try_from(replica) {
            Ok(id) if usize::from(id) < known => Ok(ReplicaId(id)),
            _ => Err(Failure::unknown("replica", replica.into())),
        }
    }
}

/// A core of the configuration `config`, JSON with the fields of CoreConfig:
/// {"cache": {"page_tokens": 16, "device_pages": [1024]}, "scheduler": {"max_running": 64}}.
/// Free it with rootstock_core_free.
///
/// # Safety
/// `config` has `config_length` bytes; `core` has room for one pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_new(
    config: *const c_char,
    config_length: usize,
    core: *mut *mut Handle<Core>,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::guard(|| {
        args::check_out("core", core)?;
        let config = settings::core(host.text("config", config, config_length)?)?;
        let made = ServingCore::new(config);
        let made = made.map_err(|error| Failure::invalid(error.to_string()))?;
        let handle = Handle::new(Core {
            core: made,
            emits: VecDeque::new(),
            drained: Vec::new(),
        });
        host.write("core", core, handle)
    })
}

/// Frees a core with all its requests. Null is nothing.
///
/// # Safety
/// `core` came from rootstock_core_new, is not used by another thread, and never again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_free(core: *mut Handle<Core>) {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::free(host, core, |_| {});
}

/// The id of a namespace; the same namespace always has the same.
///
/// # Safety
/// `core` is live, `namespace` as its structure says, `id` has room for one number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_namespace(
    core: *mut Handle<Core>,
    namespace: *const RootstockNamespace,
    id: *mut u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, core, |it| {
        args::check_out("id", id)?;
        let found = it.core.namespace(&namespace_key(host, namespace)?);
        let found = found.map_err(|error| Failure(RootstockStatus::Full, error.to_string()))?;
        host.write("id", id, found.get())
    })
}

/// Queues a request. ROOTSTOCK_STATUS_FULL: the queue is full, try after `retry_after_s` seconds.
/// ROOTSTOCK_STATUS_REFUSED: it can never run.
///
/// # Safety
/// `core` is live, `request` as its structure says, `id` has room for one number,
/// `retry_after_s` is null or has.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_add(
    core: *mut Handle<Core>,
    request: *const RootstockRequest,
    now_ns: u64,
    id: *mut u64,
    retry_after_s: *mut u32,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, core, |it| {
        args::check_out("id", id)?;
        match it.core.add(request::read(host, request)?, now_ns) {
            Admission::Admitted(request) => host.write("id", id, request.0),
            Admission::Deferred {
                queue_len,
                queue_cap,
                retry_after_s: seconds,
            } => {
                if !retry_after_s.is_null() {
                    host.write("retry_after_s", retry_after_s, seconds)?;
                }
                Err(Failure(
                    RootstockStatus::Full,
                    format!("{queue_len} requests wait, {queue_cap} may; try again in {seconds} s"),
                ))
            }
            Admission::Rejected(reason) => {
                Err(Failure(RootstockStatus::Refused, reason.to_string()))
            }
        }
    })
}

/// Ends a request: as aborted, or with `finished` 1 as finished by a stop string of the host's.
///
/// # Safety
/// `core` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_end(
    core: *mut Handle<Core>,
    request: u64,
    finished: u32,
    now_ns: u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, core, |it| {
        let id = RequestId(request);
        let ended = match finished {
            0 => it.core.abort(id, now_ns),
            _ => it.core.finish(id, FinishReason::StopString, now_ns),
        };
        if ended {
            return Ok(());
        }
        Err(Failure::unknown("request", request))
    })
}

/// The next plan of a replica; null when there is nothing to do until something changes. Free it
/// with rootstock_plan_free.
///
/// # Safety
/// `core` is live, `plan` has room for one pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_schedule(
    core: *mut Handle<Core>,
    replica_id: u32,
    now_ns: u64,
    plan: *mut *mut Handle<Plan>,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, core, |it| {
        args::check_out("plan", plan)?;
        let replica = it.replica(replica_id)?;
        let next = it.core.schedule(replica, now_ns);
        let handle = next.map_or(std::ptr::null_mut(), |next| Handle::new(Plan::new(&next)));
        host.write("plan", plan, handle)
    })
}

/// What a row of a step drew.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RootstockRowOut {
    /// Accepted tokens: 1 to `drafts` + 1 for a row that samples, else none.
    pub tokens: *const u32,
    /// How many.
    pub length: usize,
}

/// Takes the output of a step: one entry a row, in the order of the plan.
///
/// # Safety
/// `core` is live, `rows` has `row_count` entries, each as its structure says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_complete(
    core: *mut Handle<Core>,
    replica_id: u32,
    step: u64,
    rows: *const RootstockRowOut,
    row_count: usize,
    now_ns: u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, core, |it| {
        let replica = it.replica(replica_id)?;
        let mut output = StepOutput::default();
        for row in host.slice("rows", rows, row_count)? {
            let tokens = host.slice("tokens", row.tokens, row.length)?;
            output.rows.push(RowOut {
                accepted: tokens.iter().copied().collect(),
                logprobs: None,
            });
        }
        it.core.complete(replica, StepId(step), &output, now_ns);
        Ok(())
    })
}

/// Gives up a step that failed: its requests end, nothing of them is matchable.
///
/// # Safety
/// `core` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_fail_step(
    core: *mut Handle<Core>,
    replica_id: u32,
    step: u64,
    now_ns: u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, core, |it| {
        let replica = it.replica(replica_id)?;
        it.core.fail_step(replica, StepId(step), now_ns);
        Ok(())
    })
}

/// Acknowledges a copy of a plan, once; `ok` is false when it did not happen.
///
/// # Safety
/// `core` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_copy_done(
    core: *mut Handle<Core>,
    copy: u64,
    ok: bool,
    now_ns: u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, core, |it| {
        let id = CopyId(copy);
        it.core.copy_done(CopyDone { id, ok }, now_ns);
        Ok(())
    })
}

/// Lets time pass: deadlines and pins expire without traffic.
///
/// # Safety
/// `core` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_tick(
    core: *mut Handle<Core>,
    now_ns: u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, core, |it| {
        it.core.tick(now_ns);
        Ok(())
    })
}

/// Empties all tiers, or changes nothing (ROOTSTOCK_STATUS_REFUSED).
///
/// # Safety
/// `core` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_flush(
    core: *mut Handle<Core>,
    now_ns: u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, core, |it| {
        let flushed = it.core.flush(now_ns);
        flushed.map_err(|error| Failure(RootstockStatus::Refused, error.to_string()))
    })
}

/// Recounts everything from scratch; for tests.
///
/// # Safety
/// `core` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_check(core: *mut Handle<Core>) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, core, |it| {
        let checked = it.core.check();
        checked.map_err(|error| Failure(RootstockStatus::Corrupt, error.to_string()))
    })
}

/// The counters as JSON, the fields of CoreStats. `length` is what is needed, without a final 0.
///
/// # Safety
/// `core` is live, `buffer` has room for `capacity` bytes, `length` for one number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_stats(
    core: *mut Handle<Core>,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, core, |it| {
        let text = serde_json::to_string(&it.core.stats());
        let text = text.map_err(|error| Failure::invalid(error.to_string()))?;
        host.copy_out(text.as_bytes(), buffer.cast::<u8>(), capacity, length)
    })
}
