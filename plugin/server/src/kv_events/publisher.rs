//! The publisher: takes events on the core thread, numbers them, and serves both sockets.
//!
//! The core thread encodes events into the [`Ring`] and goes on; it waits for no subscriber. The
//! numbers begin at the microseconds since 1970, so that those of a restarted server go on above
//! those of the one before: a subscriber that stayed sees a gap, asks, and gets first that
//! everything is void. Nothing is lost for good: where messages are asked for that the ring has
//! no longer, or events were lost before they came here, the full account is told again, as
//! `AllBlocksCleared` and everything that is cached now.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rootstock::radix::{KvEvent, NamespaceId, NamespaceKey};
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};

use super::endpoint::Endpoint;
use super::ring::{Ring, RingState};
use super::sockets;
use super::wire::Batcher;
use super::zmtp::Role;

/// Between two full accounts, at least: each costs as much as all that is cached.
const ACCOUNT_PAUSE: Duration = Duration::from_secs(2);

/// What to publish where.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where new messages are published.
    pub events: Endpoint,
    /// Where old ones are to be had; without, a gap cannot be mended.
    pub replay: Option<Endpoint>,
    /// First part of each message.
    pub topic: String,
    /// Bytes of old messages kept.
    pub buffer_bytes: usize,
    /// Replicas, each a data-parallel rank.
    pub ranks: u16,
    /// Seconds since 1970.
    pub unix_seconds: fn() -> f64,
}

/// A socket that cannot be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot publish KV events on {endpoint}: {source}; choose another --{option}")]
pub struct BindError {
    endpoint: Endpoint,
    option: &'static str,
    source: io::Error,
}

/// What all parts share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) ring: Ring,
    pub(super) topic: Vec<u8>,
    pub(super) counters: Counters,
    /// Somebody missed what the ring has no longer.
    pub(super) want_account: Notify,
    pub(super) closing: watch::Sender<bool>,
    pub(super) unix_seconds: fn() -> f64,
    ranks: u16,
}

/// Counts; all but `subscribers` only grow.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) events: AtomicU64,
    pub(super) skipped: AtomicU64,
    pub(super) replays: AtomicU64,
    pub(super) accounts: AtomicU64,
    pub(super) subscribers: AtomicU64,
}

/// State of a publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublisherState {
    /// Number of the first message of this process: tells one start from another.
    pub incarnation: u64,
    /// The messages kept.
    pub ring: RingState,
    /// Counter: events published.
    pub events: u64,
    /// Counter: messages that subscribers missed because they read too slowly.
    pub skipped: u64,
    /// Counter: requests for old messages.
    pub replays: u64,
    /// Counter: full accounts.
    pub accounts: u64,
    /// Subscribers connected.
    pub subscribers: u64,
}

/// Both sockets. They close when it is dropped.
#[derive(Debug)]
pub struct Publisher {
    shared: Arc<Shared>,
    incarnation: u64,
    events: Bound,
    replay: Option<Bound>,
}

#[derive(Debug)]
struct Bound {
    address: SocketAddr,
    serving: tokio::task::AbortHandle,
}

/// The end of the publisher on the core thread.
#[derive(Clone, Debug)]
pub struct Feed(Arc<Shared>);

impl Publisher {
    /// Takes the addresses and serves them. Needs tokio.
    ///
    /// # Errors
    /// An address is not to be had.
    pub async fn bind(settings: Settings) -> Result<Publisher, BindError> {
        let micros = (settings.unix_seconds)() * 1e6;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "saturates; a clock before 1970 gives 0"
        )]
        let incarnation = micros as u64;
        let shared = Arc::new(Shared {
            ring: Ring::new(incarnation, settings.buffer_bytes),
            topic: settings.topic.into_bytes(),
            counters: Counters::default(),
            want_account: Notify::new(),
            closing: watch::Sender::new(false),
            unix_seconds: settings.unix_seconds,
            ranks: settings.ranks,
        });
        let events = listen(&settings.events, "kv-events", Role::Publisher, &shared).await?;
        let replay = match &settings.replay {
            Some(at) => Some(listen(at, "kv-events-replay", Role::Router, &shared).await?),
            None => None,
        };
        let publisher = Publisher {
            shared,
            incarnation,
            events,
            replay,
        };
        // Whoever knew an earlier process hears that what it knew is void.
        publisher.feed().tell_all(&[], |_| None);
        Ok(publisher)
    }

    /// The end for the core thread.
    pub fn feed(&self) -> Feed {
        Feed(Arc::clone(&self.shared))
    }

    /// Has the full account told whenever a subscriber needs it. `ask` passes the wish on to the
    /// core thread and says whether that was possible; `None` ends it.
    pub fn spawn_accounts(&self, ask: impl Fn() -> Option<bool> + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            let mut closing = shared.closing.subscribe();
            loop {
                tokio::select! {
                    () = shared.want_account.notified() => {}
                    _ = closing.wait_for(|closing| *closing) => return,
                }
                match ask() {
                    None => return,
                    Some(true) => {}
                    Some(false) => shared.want_account.notify_one(),
                }
                tokio::time::sleep(ACCOUNT_PAUSE).await;
            }
        });
    }

    /// Where new messages are published.
    pub const fn events_address(&self) -> SocketAddr {
        self.events.address
    }

    /// Where old ones are to be had.
    pub fn replay_address(&self) -> Option<SocketAddr> {
        self.replay.as_ref().map(|bound| bound.address)
    }

    /// Counts.
    pub fn state(&self) -> PublisherState {
        let counters = &self.shared.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PublisherState {
            incarnation: self.incarnation,
            ring: self.shared.ring.state(),
            events: get(&counters.events),
            skipped: get(&counters.skipped),
            replays: get(&counters.replays),
            accounts: get(&counters.accounts),
            subscribers: get(&counters.subscribers),
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.shared.closing.send_replace(true);
        self.events.serving.abort();
        if let Some(replay) = &self.replay {
            replay.serving.abort();
        }
    }
}

impl Feed {
    /// Publishes what changed.
    pub fn tell_changes<'a>(
        &self,
        events: &[KvEvent],
        name: impl Fn(NamespaceId) -> Option<&'a NamespaceKey>,
    ) {
        let mut batcher = Batcher::new((self.0.unix_seconds)(), self.0.ranks);
        events.iter().for_each(|event| batcher.add(event, &name));
        let (messages, count) = batcher.finish();
        self.0.counters.events.fetch_add(count, Ordering::Relaxed);
        messages
            .into_iter()
            .for_each(|message| self.0.ring.push(message));
    }

    /// Publishes that everything told before is void, and what is cached now.
    pub fn tell_all<'a>(
        &self,
        events: &[KvEvent],
        name: impl Fn(NamespaceId) -> Option<&'a NamespaceKey>,
    ) {
        let mut batcher = Batcher::new((self.0.unix_seconds)(), self.0.ranks);
        batcher.clear_all();
        events.iter().for_each(|event| batcher.add(event, &name));
        let (messages, count) = batcher.finish();
        self.0.counters.events.fetch_add(count, Ordering::Relaxed);
        self.0.counters.accounts.fetch_add(1, Ordering::Relaxed);
        self.0.ring.push_whole(messages);
    }
}

async fn listen(
    endpoint: &Endpoint,
    option: &'static str,
    role: Role,
    shared: &Arc<Shared>,
) -> Result<Bound, BindError> {
    let failed = |source| BindError {
        endpoint: endpoint.clone(),
        option,
        source,
    };
    let listener = TcpListener::bind((endpoint.host(), endpoint.port()))
        .await
        .map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let serving = tokio::spawn(sockets::serve(listener, role, Arc::clone(shared)));
    Ok(Bound {
        address,
        serving: serving.abort_handle(),
    })
}
