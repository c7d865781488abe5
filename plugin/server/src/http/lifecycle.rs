//! The life of the server as a state machine: serving, draining, expired.
//!
//! While draining, requests already in run on and new ones are refused; when the deadline passes
//! the phase becomes expired and every request still running ends itself with an error. Whoever
//! shuts down waits for [`Lifecycle::idle`]. Nothing here knows signals or sockets.

use std::sync::Arc;

use tokio::sync::watch;

use crate::http::api_error::{ApiError, ErrorKind};

/// Where the server stands. It only moves forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Requests are taken.
    Serving,
    /// Running requests finish, new ones get 503.
    Draining,
    /// The drain deadline has passed: running requests end with an error.
    Expired,
}

/// Phase and number of requests in work, shared by all of them.
#[derive(Debug)]
pub struct Lifecycle {
    phase: watch::Sender<Phase>,
    live: watch::Sender<usize>,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Lifecycle {
            phase: watch::Sender::new(Phase::Serving),
            live: watch::Sender::new(0),
        }
    }
}

impl Lifecycle {
    /// Where the server stands now.
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Requests in work.
    pub fn live(&self) -> usize {
        *self.live.borrow()
    }

    /// Counts a request in, until the returned guard is dropped.
    ///
    /// # Errors
    /// `Draining` when the server takes no more requests.
    pub fn enter(self: &Arc<Self>) -> Result<LiveRequest, ApiError> {
        // Counted before the look at the phase: a drain that starts in between waits for us.
        self.live.send_modify(|live| *live += 1);
        let guard = LiveRequest(Arc::clone(self));
        match self.phase() {
            Phase::Serving => Ok(guard),
            Phase::Draining | Phase::Expired => Err(draining()),
        }
    }

    /// No new requests from here on.
    pub fn start_drain(&self) {
        self.advance(Phase::Draining);
    }

    /// Running requests end now.
    pub fn expire(&self) {
        self.advance(Phase::Expired);
    }

    /// Resolves when the drain deadline has passed.
    pub async fn expired(&self) {
        wait(&self.phase, |phase| *phase == Phase::Expired).await;
    }

    /// Resolves when a drain has begun.
    pub async fn draining(&self) {
        wait(&self.phase, |phase| *phase >= Phase::Draining).await;
    }

    /// Resolves when no request is in work.
    pub async fn idle(&self) {
        wait(&self.live, |live| *live == 0).await;
    }

    fn advance(&self, to: Phase) {
        self.phase.send_if_modified(|phase| {
            let moves = *phase < to;
            *phase = (*phase).max(to);
            moves
        });
    }
}

/// The error of a request that comes, or is cut, while the server goes down.
pub fn draining() -> ApiError {
    ApiError::new(ErrorKind::Draining, "the server is shutting down").retry_after(5)
}

async fn wait<T>(sender: &watch::Sender<T>, until: impl FnMut(&T) -> bool) {
    // An error means the sender is gone; it is borrowed, so it is not.
    drop(sender.subscribe().wait_for(until).await);
}

/// One request in work. Dropping it counts the request out.
#[derive(Debug)]
pub struct LiveRequest(Arc<Lifecycle>);

impl LiveRequest {
    /// The state machine this request is counted in.
    pub fn lifecycle(&self) -> &Arc<Lifecycle> {
        &self.0
    }
}

impl Drop for LiveRequest {
    fn drop(&mut self) {
        self.0.live.send_modify(|live| *live -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn draining_refuses_new_requests_and_waits_for_the_running_ones() {
        let life = Arc::new(Lifecycle::default());
        let running = life.enter().unwrap();
        life.start_drain();
        life.draining().await;
        let refused = life.enter().unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Draining);
        assert_eq!(life.live(), 1, "a refused request is not counted");
        let waiter = tokio::spawn({
            let life = Arc::clone(&life);
            async move { life.idle().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiter.is_finished());
        drop(running);
        waiter.await.unwrap();
    }

    #[tokio::test]
    async fn the_phase_never_moves_back() {
        let life = Arc::new(Lifecycle::default());
        life.expire();
        life.expired().await;
        life.start_drain();
        assert_eq!(life.phase(), Phase::Expired);
    }
}
