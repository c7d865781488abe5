//! The two sockets: one publishes what is new, one sends old messages again.
//!
//! A connection holds a place in the ring and the message on its way, nothing else. A subscriber
//! that does not read stops at its TCP window; when it reads on, it gets the oldest message that is
//! still kept, sees the gap in the numbers, and asks the other socket.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};

use super::publisher::Shared;
use super::ring::Ring;
use super::wire::Batcher;
use super::zmtp::{self, Role, Wish, ZmtpError};

/// Connections of each socket at the same time.
const CONNECTIONS_MAX: usize = 64;
/// Topics a connection may subscribe to.
const TOPICS_MAX: usize = 16;
/// Frames of a request for old messages.
const REQUEST_FRAMES_MAX: usize = 8;
/// Time for the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Wishes of a peer that may wait; then it is no longer read.
const WISHES_MAX: usize = 16;
/// The number that ends an answer.
const END: [u8; 8] = [0xff; 8];

/// Accepts connections for ever.
pub(super) async fn serve(listener: TcpListener, role: Role, shared: Arc<Shared>) {
    let seats = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let (socket, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "KV events: cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        let Ok(seat) = Arc::clone(&seats).try_acquire_owned() else {
            tracing::warn!(%peer, limit = CONNECTIONS_MAX, "KV events: too many connections");
            continue;
        };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let mut closing = shared.closing.subscribe();
            let ended = tokio::select! {
                ended = talk(socket, role, &shared) => ended,
                _ = closing.wait_for(|closing| *closing) => Ok(()),
            };
            if let Err(error) = ended {
                tracing::debug!(%peer, %error, "KV events: connection ended");
            }
            drop(seat);
        });
    }
}

async fn talk(mut socket: TcpStream, role: Role, shared: &Shared) -> Result<(), ZmtpError> {
    socket.set_nodelay(true)?;
    tokio::time::timeout(HANDSHAKE, zmtp::greet(&mut socket, role))
        .await
        .map_err(|_| ZmtpError::Late)??;
    let (reader, writer) = socket.into_split();
    match role {
        Role::Publisher => {
            let (tell, wishes) = mpsc::channel(WISHES_MAX);
            shared.counters.subscribers.fetch_add(1, Ordering::Relaxed);
            let ended = tokio::select! {
                ended = read_wishes(reader, tell) => ended,
                ended = publish(writer, wishes, shared) => ended,
            };
            shared.counters.subscribers.fetch_sub(1, Ordering::Relaxed);
            ended
        }
        Role::Router => {
            let (tell, requests) = mpsc::channel(WISHES_MAX);
            tokio::select! {
                ended = read_requests(reader, tell) => ended,
                ended = answer(writer, requests, shared) => ended,
            }
        }
    }
}

async fn read_wishes(mut reader: OwnedReadHalf, tell: mpsc::Sender<Wish>) -> Result<(), ZmtpError> {
    loop {
        let wish = zmtp::wish(&zmtp::read_frame(&mut reader).await?);
        if tell.send(wish).await.is_err() {
            return Ok(());
        }
    }
}

async fn publish(
    mut writer: OwnedWriteHalf,
    mut wishes: mpsc::Receiver<Wish>,
    shared: &Shared,
) -> Result<(), ZmtpError> {
    let mut topics: Vec<Vec<u8>> = Vec::new();
    let mut grown = shared.ring.watch();
    let mut next = shared.ring.state().next;
    let mut out = Vec::new();
    loop {
        out.clear();
        tokio::select! {
            biased;
            wish = wishes.recv() => match wish {
                None => return Ok(()),
                Some(Wish::Subscribe(topic)) => {
                    if topics.is_empty() {
                        next = shared.ring.state().next;
                        // Its number tells the newcomer whether there was something before.
                        shared.ring.push(Batcher::empty((shared.unix_seconds)()));
                    }
                    if topics.len() < TOPICS_MAX {
                        topics.push(topic);
                    }
                }
                Some(Wish::Cancel(topic)) => {
                    if let Some(at) = topics.iter().position(|have| *have == topic) {
                        topics.swap_remove(at);
                    }
                }
                Some(Wish::Ping(context)) => {
                    zmtp::put_pong(&mut out, &context);
                    writer.write_all(&out).await?;
                }
                Some(Wish::Other) => {}
            },
            (number, message) = message(&shared.ring, &mut grown, next) => {
                if topics.iter().any(|topic| shared.topic.starts_with(topic)) {
                    let skipped = number - next;
                    shared.counters.skipped.fetch_add(skipped, Ordering::Relaxed);
                    let parts: [&[u8]; 3] = [&shared.topic, &number.to_be_bytes(), &message];
                    zmtp::put_message(&mut out, &parts);
                    writer.write_all(&out).await?;
                }
                next = number + 1;
            }
        }
    }
}

/// Message `next`, or the oldest one kept after it; waits for it.
async fn message(ring: &Ring, grown: &mut watch::Receiver<u64>, next: u64) -> (u64, Arc<[u8]>) {
    loop {
        grown.mark_unchanged();
        if let Some(found) = ring.read(next) {
            return found;
        }
        if grown.changed().await.is_err() {
            // The ring outlives its readers.
            std::future::pending::<()>().await;
        }
    }
}

/// What stands before the number in a request and goes back in front of each answer, and the
/// number; `None` when it is no number.
struct Request {
    envelope: Vec<Vec<u8>>,
    from: Option<u64>,
}

async fn read_requests(
    mut reader: OwnedReadHalf,
    tell: mpsc::Sender<Result<Request, Vec<u8>>>,
) -> Result<(), ZmtpError> {
    let mut frames: Vec<Vec<u8>> = Vec::new();
    loop {
        let frame = zmtp::read_frame(&mut reader).await?;
        let said = if frame.command {
            match zmtp::wish(&frame) {
                Wish::Ping(context) => Err(context),
                Wish::Subscribe(_) | Wish::Cancel(_) | Wish::Other => continue,
            }
        } else {
            let bytes = frame.body.len() as u64;
            frames.push(frame.body);
            if frames.len() > REQUEST_FRAMES_MAX {
                return Err(ZmtpError::Frame { bytes, flags: 0 });
            }
            if frame.more {
                continue;
            }
            let mut envelope = std::mem::take(&mut frames);
            let last = envelope.pop().unwrap_or_default();
            let from = last.as_slice().try_into().ok().map(u64::from_be_bytes);
            Ok(Request { envelope, from })
        };
        if tell.send(said).await.is_err() {
            return Ok(());
        }
    }
}

async fn answer(
    mut writer: OwnedWriteHalf,
    mut requests: mpsc::Receiver<Result<Request, Vec<u8>>>,
    shared: &Shared,
) -> Result<(), ZmtpError> {
    while let Some(request) = requests.recv().await {
        match request {
            Err(context) => {
                let mut out = Vec::new();
                zmtp::put_pong(&mut out, &context);
                writer.write_all(&out).await?;
            }
            Ok(request) => {
                shared.counters.replays.fetch_add(1, Ordering::Relaxed);
                send_again(&mut writer, &request, shared).await?;
            }
        }
    }
    Ok(())
}

/// Sends all messages from the one asked for to the newest now, then the end mark. Where some of
/// them are gone for good, a full account follows on the other socket.
async fn send_again<W: AsyncWrite + Unpin>(
    writer: &mut W,
    request: &Request,
    shared: &Shared,
) -> Result<(), ZmtpError> {
    let end = shared.ring.state().next;
    let mut whole = true;
    let mut out = Vec::new();
    let envelope: Vec<&[u8]> = request.envelope.iter().map(Vec::as_slice).collect();
    let mut next = request.from.unwrap_or(end);
    while next < end {
        whole &= shared.ring.tells_all_from(next);
        let Some((number, message)) = shared.ring.read(next).filter(|found| found.0 < end) else {
            break;
        };
        let bytes = number.to_be_bytes();
        let body: [&[u8]; 2] = [&bytes, &message];
        out.clear();
        zmtp::put_message(&mut out, &[&envelope[..], &body].concat());
        writer.write_all(&out).await?;
        next = number + 1;
    }
    let body: [&[u8]; 2] = [&END, &[]];
    out.clear();
    zmtp::put_message(&mut out, &[&envelope[..], &body].concat());
    writer.write_all(&out).await?;
    if !whole {
        shared.want_account.notify_one();
    }
    Ok(())
}
