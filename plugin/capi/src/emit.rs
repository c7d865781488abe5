//! What becomes of requests, one event at a time.

use rootstock::scheduler::{Emit, FailKind, FinishReason};

use crate::args::{self, Host};
use crate::core::Core;
use crate::handle::{self, Handle};
use crate::status::RootstockStatus;

/// What an event tells.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RootstockEventKind {
    /// There is none.
    Nothing = 0,
    /// The request began; the cached tokens are set.
    Started = 1,
    /// It drew tokens.
    Tokens = 2,
    /// It ended; the last event of each admitted request.
    Final = 3,
}

/// Why a request ended.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RootstockReason {
    /// It has not.
    Running = 0,
    /// A stop token.
    Stop = 1,
    /// The host said so.
    StopString = 2,
    /// `max_tokens` or the model length.
    Length = 3,
    /// Aborted by the host.
    Aborted = 4,
    /// Its step failed.
    StepFailed = 5,
    /// The output of its step did not fit the plan.
    BadOutput = 6,
    /// Deadline or queue timeout.
    Expired = 7,
    /// No pages, and nothing left to take them from.
    OutOfPages = 8,
    /// Gave way as often as is allowed.
    TooManyPreemptions = 9,
    /// Gave its place in the full queue to a better one.
    Displaced = 10,
}

/// One event of one request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RootstockEvent {
    /// What it tells.
    pub kind: RootstockEventKind,
    /// Why it ended, with ROOTSTOCK_EVENT_KIND_FINAL.
    pub reason: RootstockReason,
    /// Ours.
    pub request: u64,
    /// The host's.
    pub label: u64,
    /// Tokens drawn, with ROOTSTOCK_EVENT_KIND_TOKENS.
    pub token_count: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens found on the device.
    pub cached_device_tokens: u32,
    /// Prompt tokens found on host.
    pub cached_host_tokens: u32,
    /// Prompt tokens found in storage.
    pub cached_storage_tokens: u32,
    /// Tokens generated, with ROOTSTOCK_EVENT_KIND_FINAL.
    pub completion_tokens: u32,
    /// Times it gave way, with ROOTSTOCK_EVENT_KIND_FINAL.
    pub preemptions: u32,
}

const NOTHING: RootstockEvent = RootstockEvent {
    kind: RootstockEventKind::Nothing,
    reason: RootstockReason::Running,
    request: 0,
    label: 0,
    token_count: 0,
    prompt_tokens: 0,
    cached_device_tokens: 0,
    cached_host_tokens: 0,
    cached_storage_tokens: 0,
    completion_tokens: 0,
    preemptions: 0,
};

fn reason_of(reason: FinishReason) -> RootstockReason {
    match reason {
        FinishReason::Stop => RootstockReason::Stop,
        FinishReason::StopString => RootstockReason::StopString,
        FinishReason::Length => RootstockReason::Length,
        FinishReason::Aborted => RootstockReason::Aborted,
        FinishReason::Failed(FailKind::Step) => RootstockReason::StepFailed,
        FinishReason::Failed(FailKind::BadOutput) => RootstockReason::BadOutput,
        FinishReason::Expired => RootstockReason::Expired,
        FinishReason::OutOfPages => RootstockReason::OutOfPages,
        FinishReason::TooManyPreemptions => RootstockReason::TooManyPreemptions,
        FinishReason::Displaced => RootstockReason::Displaced,
    }
}

fn event_of(emit: &Emit) -> RootstockEvent {
    let event = RootstockEvent {
        request: emit.request().0,
        label: emit.label(),
        ..NOTHING
    };
    match emit {
        Emit::Started {
            cached,
            prompt_tokens,
            ..
        } => RootstockEvent {
            kind: RootstockEventKind::Started,
            prompt_tokens: *prompt_tokens,
            cached_device_tokens: cached.device,
            cached_host_tokens: cached.host,
            cached_storage_tokens: cached.storage,
            ..event
        },
        Emit::Tokens { tokens, .. } => RootstockEvent {
            kind: RootstockEventKind::Tokens,
            token_count: tokens.len(),
            ..event
        },
        Emit::Final { reason, usage, .. } => RootstockEvent {
            kind: RootstockEventKind::Final,
            reason: reason_of(*reason),
            prompt_tokens: usage.prompt_tokens,
            cached_device_tokens: usage.cached.device,
            cached_host_tokens: usage.cached.host,
            cached_storage_tokens: usage.cached.storage,
            completion_tokens: usage.completion_tokens,
            preemptions: usage.preemptions,
            ..event
        },
    }
}

/// The next event, ROOTSTOCK_EVENT_KIND_NOTHING when there is none. `tokens` gets what was
/// drawn; with too little room the event stays and `event->token_count` says how much is needed.
///
/// # Safety
/// `core` is live, `event` has room, `tokens` has room for `capacity` tokens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_core_next_event(
    core: *mut Handle<Core>,
    event: *mut RootstockEvent,
    tokens: *mut u32,
    capacity: usize,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, core, |it| {
        args::check_out("event", event)?;
        let Some(emit) = it.next_emit() else {
            return host.write("event", event, NOTHING);
        };
        host.write("event", event, event_of(emit))?;
        if let Emit::Tokens { tokens: drawn, .. } = emit {
            let mut length = 0;
            host.copy_out(drawn, tokens, capacity, &raw mut length)?;
        }
        it.emits.pop_front();
        Ok(())
    })
}
