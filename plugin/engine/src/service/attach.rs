//! A storage tier that comes and goes while requests run.
//!
//! ```text
//!   attach   caller: open the store    core thread: take it into use, or hand it back
//!   detach   core thread: use it no more, hand it over    caller: end its worker
//!            core thread: what was not answered is not done; requests compute it
//! ```
//! Opening and closing may wait for a disk or a network, so the caller's thread does that.

use rootstock::memory::{Nanos, StoreEngine, StoreEvent, StorePlan};

use super::config::STORAGE_PROBES;
use super::core_thread::{CoreThread, Message};
use super::{Service, StorageConfig, store};
use crate::error::EngineError;

/// Why a storage tier was not attached or detached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The store cannot be used.
    #[error(transparent)]
    Store(#[from] EngineError),
    /// There is one already.
    #[error("a storage tier is attached; detach it first")]
    Attached,
    /// The last one is not at its end.
    #[error("the storage tier before is still being detached; ask again")]
    Busy,
    /// There is none.
    #[error("no storage tier is attached")]
    Nothing,
    /// No core is there to use it.
    #[error("the engine is dead")]
    EngineDead,
}

/// A store on its way to the core thread.
pub(super) struct Arrival {
    store: Box<dyn StoreEngine>,
    pages: u32,
    reply: flume::Sender<Result<(), Refused>>,
}

/// Why it was not taken, and the store.
struct Refused(AttachError, Box<dyn StoreEngine>);

impl std::fmt::Debug for Arrival {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arrival")
            .field("pages", &self.pages)
            .finish_non_exhaustive()
    }
}

/// A store on its way out of the core thread.
pub(super) struct Departure(flume::Sender<Box<dyn StoreEngine>>);

impl std::fmt::Debug for Departure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Departure")
    }
}

impl Service {
    /// Takes a storage tier into use. Requests run on meanwhile; blocks the caller for as long as
    /// the store takes to open.
    ///
    /// # Errors
    /// The store cannot be used, there is one already, or there is no host tier.
    pub fn attach_storage(&self, config: &StorageConfig) -> Result<(), AttachError> {
        let place = &self.inner.place;
        let store = store::open(config, place, store::waker(&self.inner.inbox))?;
        let (reply, answer) = flume::bounded(1);
        let arrival = Arrival {
            store,
            pages: config.pages(self.inner.info.page_bytes),
            reply,
        };
        let sent = self.inner.inbox.send(Message::Attach(arrival));
        sent.map_err(|_| AttachError::EngineDead)?;
        match answer.recv() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(Refused(error, store))) => {
                drop(store);
                Err(error)
            }
            Err(_) => Err(AttachError::EngineDead),
        }
    }

    /// Uses the storage tier no more. Requests run on, and compute what they waited for; when
    /// this returns, nothing touches the store any longer. Blocks the caller for as long as the
    /// one read or write under way takes.
    ///
    /// # Errors
    /// There is none.
    pub fn detach_storage(&self) -> Result<(), AttachError> {
        let (reply, store) = flume::bounded(1);
        let sent = self.inner.inbox.send(Message::Detach(Departure(reply)));
        sent.map_err(|_| AttachError::EngineDead)?;
        let store = store.recv().map_err(|_| AttachError::Nothing)?;
        let rest = store.close();
        let sent = self.inner.inbox.send(Message::StoreEnded(rest));
        sent.map_err(|_| AttachError::EngineDead)
    }
}

impl CoreThread {
    pub(super) fn attach(&mut self, arrival: Arrival) {
        let Arrival {
            store,
            pages,
            reply,
        } = arrival;
        let refusal = if self.storage.is_some() {
            Some(AttachError::Attached)
        } else if self.core.attach_storage(pages, STORAGE_PROBES) {
            None
        } else {
            Some(AttachError::Busy)
        };
        let answer = match refusal {
            Some(error) => Err(Refused(error, store)),
            None => {
                self.storage = Some(store);
                Ok(())
            }
        };
        self.dirty = true;
        // Whoever hears of it finds its counters.
        self.publish(true);
        // A caller that is gone has what it asked for.
        let _gone = reply.try_send(answer);
    }

    /// Hands the store over; without one the caller hears that by the end of its channel.
    pub(super) fn detach(&mut self, departure: &Departure, now: Nanos) {
        let Some(mut store) = self.storage.take() else {
            return;
        };
        store::hear(&mut *store, &mut self.core, now);
        self.core.detach_storage();
        // What the store was not given yet is not done.
        let mut plans: Vec<StorePlan> = Vec::new();
        self.core.drain_store(&mut plans);
        let not_done = plans.into_iter().map(|plan| StoreEvent::Done {
            id: plan.id,
            pages: vec![false; plan.pages.len()],
        });
        self.store_ended(not_done.collect(), now);
        self.dirty = true;
        self.publish(true);
        if let Err(unheard) = departure.0.try_send(store) {
            // Nobody waits for it: it ends here.
            self.store_ended(unheard.into_inner().close(), now);
        }
    }

    /// What a store had still to tell.
    pub(super) fn store_ended(&mut self, rest: Vec<StoreEvent>, now: Nanos) {
        rest.into_iter()
            .for_each(|event| self.core.store_event(event, now));
    }
}
