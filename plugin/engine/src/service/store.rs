//! The storage tier of a service: plans of the core go to a store's worker, what it tells comes
//! back. Without the feature `storage` no address is known.

use std::fmt;
use std::time::Duration;

use rootstock::ServingCore;
use rootstock::memory::{KvLayout, Nanos, StoreEngine, StoreEvent, without_secrets};

use super::core_thread::Message;
use crate::cpu_backend::SharedArena;
use crate::error::EngineError;

/// Where pages are stored and how much of them.
#[derive(Clone, Debug)]
pub struct StorageConfig {
    /// `fs:///folder`; other schemes by further features.
    pub uri: String,
    /// Most bytes in the store.
    pub quota_mib: u64,
    /// What has not been read after this time is computed.
    pub read_timeout: Duration,
}

impl StorageConfig {
    /// Pages of so many bytes that the quota holds.
    pub(super) fn pages(&self, page_bytes: u64) -> u32 {
        let pages = self.quota_mib.saturating_mul(1 << 20) / page_bytes.max(1);
        u32::try_from(pages).unwrap_or(u32::MAX).clamp(1, 1 << 24)
    }
}

/// What a store works with.
#[derive(Clone)]
pub(super) struct Place {
    /// The bytes of the host tier, where they are ours.
    pub(super) host: Option<SharedArena>,
    pub(super) layout: KvLayout,
    /// Names the arithmetic.
    pub(super) numerics: String,
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").finish_non_exhaustive()
    }
}

/// What wakes the core thread when a store has something to tell.
pub(super) fn waker(inbox: &flume::Sender<Message>) -> impl Fn() + Send + 'static {
    let inbox = inbox.clone();
    // A full inbox wakes the core thread by itself.
    move || drop(inbox.try_send(Message::Wake))
}

/// Opens a store over the host arena.
///
/// # Errors
/// The address cannot be used, or there is no host arena.
pub(super) fn open(
    config: &StorageConfig,
    place: &Place,
    wake: impl Fn() + Send + 'static,
) -> Result<Box<dyn StoreEngine>, EngineError> {
    let host = place.host.clone();
    let host = host.ok_or_else(|| without_host(config))?;
    start(config, host, place.layout, &place.numerics, wake)
}

pub(super) fn without_host(config: &StorageConfig) -> EngineError {
    EngineError::Storage {
        uri: without_secrets(&config.uri),
        reason:
            "it needs a host tier, through which pages pass; the host tier has 0 pages, give it \
more memory (--host-kv-mib)"
                .to_owned(),
    }
}

#[cfg(feature = "storage")]
fn start(
    config: &StorageConfig,
    host: SharedArena,
    layout: KvLayout,
    numerics: &str,
    wake: impl Fn() + Send + 'static,
) -> Result<Box<dyn StoreEngine>, EngineError> {
    use rootstock::memory::storage::{Storage, StorageOptions};
    let options = StorageOptions {
        uri: config.uri.clone(),
        layout,
        numerics: numerics.to_owned(),
        quota_bytes: config.quota_mib.saturating_mul(1 << 20),
        queue: QUEUE,
        read_timeout: config.read_timeout,
    };
    let storage = Storage::open(&options, HostArena(host), wake);
    storage
        .map(|storage| Box::new(storage) as Box<dyn StoreEngine>)
        .map_err(|error| EngineError::Storage {
            uri: without_secrets(&config.uri),
            reason: error.to_string(),
        })
}

#[cfg(not(feature = "storage"))]
fn start(
    config: &StorageConfig,
    _host: SharedArena,
    _layout: KvLayout,
    _numerics: &str,
    _wake: impl Fn() + Send + 'static,
) -> Result<Box<dyn StoreEngine>, EngineError> {
    Err(EngineError::Storage {
        uri: without_secrets(&config.uri),
        reason: "this build has no storage tier; build it with `--features storage`".to_owned(),
    })
}

/// Plans that wait for the worker at most.
#[cfg(feature = "storage")]
const QUEUE: usize = 256;

/// The host tier as the store's worker sees it: one page at a time.
#[cfg(feature = "storage")]
struct HostArena(SharedArena);

#[cfg(feature = "storage")]
impl HostArena {
    fn with<T>(
        &self,
        page: rootstock::memory::PageId,
        act: impl FnOnce(&mut rootstock::memory::KvArena) -> T,
    ) -> Option<T> {
        let mut arena = self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let there = page.get() >= 1 && page.get() <= arena.total();
        there.then(|| act(&mut arena))
    }
}

#[cfg(feature = "storage")]
impl rootstock::memory::storage::HostPages for HostArena {
    fn read(&mut self, page: rootstock::memory::PageId, out: &mut [u8]) -> bool {
        let read = self.with(page, |arena| {
            let bytes = arena.page(page);
            let fits = bytes.len() == out.len();
            if fits {
                out.copy_from_slice(bytes);
            }
            fits
        });
        read == Some(true)
    }

    fn write(&mut self, page: rootstock::memory::PageId, bytes: &[u8]) -> bool {
        let written = self.with(page, |arena| {
            let target = arena.page_mut(page);
            let fits = bytes.len() == target.len();
            if fits {
                target.copy_from_slice(bytes);
            }
            fits
        });
        written == Some(true)
    }
}

/// Tells the core what the store told.
pub(super) fn hear(store: &mut dyn StoreEngine, core: &mut ServingCore, now: Nanos) {
    let mut events = Vec::new();
    store.poll(&mut events);
    events
        .into_iter()
        .for_each(|event| core.store_event(event, now));
}

/// Hands plans of the core over; what cannot be taken is not done.
pub(super) fn feed(store: &mut dyn StoreEngine, core: &mut ServingCore, now: Nanos) {
    let mut plans = Vec::new();
    core.drain_store(&mut plans);
    for plan in plans {
        if let Err(plan) = store.submit(plan) {
            let pages = vec![false; plan.pages.len()];
            core.store_event(StoreEvent::Done { id: plan.id, pages }, now);
        }
    }
}
