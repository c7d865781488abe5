//! The state of all running requests with grammars, and the thread that keeps it ahead.
//!
//! ```text
//! core thread     begin(request)                                       end(request)
//! engine thread           allowed(0) draw drawn(0)    allowed(1) draw ..
//! masks thread    mask 0 ^                 take, mask 1 ^
//! ```
//!
//! The mask for output `n + 1` is worked out while the core plans and the engine computes the next
//! step; `allowed` waits for it only when it is late. What goes wrong with a grammar ends its
//! answer: the only token left is the end token.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use llguidance::Matcher;
use rootstock::Masks;
use rootstock::radix::Token;
use rootstock::scheduler::RequestId;

use super::Grammar;

/// Which tokens may be drawn, for all running requests.
#[derive(Debug)]
pub struct GrammarMasks {
    shared: Arc<Shared>,
    work: Option<flume::Sender<Work>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    states: Mutex<BTreeMap<u64, State>>,
    changed: Condvar,
}

struct State {
    /// Away while a mask is worked out.
    matcher: Option<Matcher>,
    /// The next output, and its mask once that is known.
    next: u32,
    mask: Option<Arc<[u32]>>,
    /// The mask should the grammar fail.
    end: Arc<[u32]>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("next", &self.next)
            .finish_non_exhaustive()
    }
}

/// Take this token, if any, and say what may follow.
#[derive(Debug)]
struct Work {
    request: u64,
    token: Option<Token>,
}

impl GrammarMasks {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start() -> std::io::Result<GrammarMasks> {
        let shared = Arc::new(Shared::default());
        // One piece of work a request and draw: the number of running requests bounds it.
        let (work, inbox) = flume::unbounded::<Work>();
        let thread = std::thread::Builder::new()
            .name("rootstock-masks".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || inbox.iter().for_each(|work| shared.run(&work))
            })?;
        Ok(GrammarMasks {
            shared,
            work: Some(work),
            thread: Some(thread),
        })
    }

    /// A request with a grammar was admitted.
    pub fn begin(&self, request: RequestId, grammar: &Grammar) {
        let state = State {
            matcher: Some(grammar.begin()),
            next: 0,
            mask: None,
            end: Arc::clone(&grammar.end),
        };
        self.shared.lock().insert(request.0, state);
        self.send(request, None);
    }

    /// The request is over.
    pub fn end(&self, request: RequestId) {
        self.shared.lock().remove(&request.0);
        self.shared.changed.notify_all();
    }

    fn send(&self, request: RequestId, token: Option<Token>) {
        let request = request.0;
        let sent = self
            .work
            .as_ref()
            .map(|work| work.send(Work { request, token }));
        if !matches!(sent, Some(Ok(()))) {
            self.shared.fail(request);
        }
    }
}

impl Masks for GrammarMasks {
    fn allowed(&self, request: RequestId, output_index: u32) -> Option<Arc<[u32]>> {
        let mut states = self.shared.lock();
        loop {
            let state = states.get(&request.0)?;
            if state.next != output_index {
                // Nothing draws twice or ahead; should it, the answer ends.
                return Some(Arc::clone(&state.end));
            }
            if let Some(mask) = &state.mask {
                return Some(Arc::clone(mask));
            }
            states = self
                .shared
                .changed
                .wait(states)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn applies(&self, request: RequestId) -> bool {
        self.shared.lock().contains_key(&request.0)
    }

    fn drawn(&self, request: RequestId, output_index: u32, token: Token) {
        {
            let mut states = self.shared.lock();
            let Some(state) = states.get_mut(&request.0) else {
                return;
            };
            state.next = output_index + 1;
            state.mask = None;
        }
        self.send(request, Some(token));
    }
}

impl Drop for GrammarMasks {
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the masks thread panicked");
        }
    }
}

impl Shared {
    /// Each change is whole, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, State>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, work: &Work) {
        let taken = self
            .lock()
            .get_mut(&work.request)
            .and_then(|state| state.matcher.take());
        let Some(matcher) = taken else {
            self.fail(work.request);
            return;
        };
        let made = catch_unwind(AssertUnwindSafe(|| advance(matcher, work.token)));
        match made {
            Ok(Ok((matcher, mask))) => {
                if let Some(state) = self.lock().get_mut(&work.request) {
                    state.matcher = Some(matcher);
                    state.mask = Some(mask);
                }
                self.changed.notify_all();
            }
            Ok(Err(error)) => {
                tracing::warn!("a grammar ends its answer: {error}");
                self.fail(work.request);
            }
            Err(_) => {
                tracing::error!("a grammar panicked and ends its answer");
                self.fail(work.request);
            }
        }
    }

    fn fail(&self, request: u64) {
        if let Some(state) = self.lock().get_mut(&request) {
            state.mask = Some(Arc::clone(&state.end));
        }
        self.changed.notify_all();
    }
}

fn advance(mut matcher: Matcher, token: Option<Token>) -> Result<(Matcher, Arc<[u32]>), String> {
    if let Some(token) = token
        && !matcher.is_stopped()
    {
        matcher
            .consume_token(token)
            .map_err(|error| error.to_string())?;
    }
    let mask = matcher
        .compute_mask_or_eos()
        .map_err(|error| error.to_string())?;
    if mask.is_zero() {
        return Err("no token may follow".to_owned());
    }
    Ok((matcher, mask.as_slice().into()))
}
