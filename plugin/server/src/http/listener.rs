//! Accepts connections and serves HTTP/1.1 on them, within limits that `axum::serve` does not
//! have: a cap on connections, a time limit and size limits for request heads, and an end for
//! clients that stop reading.
//!
//! The end of the client's sending side counts as its disappearance: the handler's future is
//! dropped, which stops the work. A half-closed client cannot be told from a vanished one.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tower::Service;

use crate::config::HttpLimits;
use crate::http::linger;
use crate::http::stall_guard::StallGuard;

/// Bytes of a request head, at most; beyond, the answer is 431.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Headers of a request, at most; beyond, the answer is 431.
const HEADERS_MAX: usize = 128;
/// A client that reads nothing for so long is cut off.
const WRITE_STALL: Duration = Duration::from_secs(120);
/// Connections beyond the cap that may still be read from while they close.
const TURNED_AWAY_MAX: usize = 64;
/// How long closing connections may take after the last answer.
const LINGER: Duration = Duration::from_secs(2);

const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n\
    content-length: 109\r\nretry-after: 1\r\nconnection: close\r\n\r\n\
    {\"error\":{\"message\":\"too many connections are open\",\
    \"type\":\"server_error\",\"param\":null,\"code\":\"overloaded\"}}\n";

/// The address of the client, as an extension of each request.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

/// Closes the connection after the answer in work, as an extension of each request.
#[derive(Clone, Debug)]
pub struct HangUp(Arc<Notify>);

impl HangUp {
    /// Asks for the end of the connection after the current answer.
    pub fn after_this_answer(&self) {
        self.0.notify_one();
    }
}

/// Serves until `stop` resolves, then closes idle connections at once and the others after their
/// current answer, for at most two seconds.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: HttpLimits,
    stop: impl Future<Output = ()>,
) {
    let seats = Arc::new(Semaphore::new(limits.max_connections));
    let doormen = Arc::new(Semaphore::new(TURNED_AWAY_MAX));
    let closing = watch::Sender::new(false);
    tokio::pin!(stop);
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut stop => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((socket, peer)) => match Arc::clone(&seats).try_acquire_owned() {
                Ok(seat) => {
                    let connection = Connection {
                        peer,
                        router: router.clone(),
                        limits,
                        seat,
                    };
                    tokio::spawn(connection.run(socket, closing.subscribe()));
                }
                Err(_) => turn_away(socket, &doormen),
            },
            Err(error) => {
                // Out of file handles, or the client is gone already: others may do better.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
    drop(listener);
    closing.send_replace(true);
    let all = u32::try_from(limits.max_connections).unwrap_or(u32::MAX);
    if tokio::time::timeout(LINGER, seats.acquire_many(all))
        .await
        .is_err()
    {
        tracing::warn!("connections were still open at the end");
    }
}

/// One fixed answer, as far as the socket takes it without waiting; a fresh socket takes all.
fn turn_away(socket: TcpStream, doormen: &Arc<Semaphore>) {
    if let Err(error) = socket.try_write(FULL) {
        tracing::debug!(%error, "could not turn a connection away politely");
        return;
    }
    // With more of them than that, some see a reset instead of the answer.
    if let Ok(doorman) = Arc::clone(doormen).try_acquire_owned() {
        tokio::spawn(async move {
            linger::close(socket).await;
            drop(doorman);
        });
    }
}

struct Connection {
    peer: SocketAddr,
    router: Router,
    limits: HttpLimits,
    // Held until the connection ends.
    seat: OwnedSemaphorePermit,
}

impl Connection {
    async fn run(self, socket: TcpStream, mut closing: watch::Receiver<bool>) {
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%error, "no TCP_NODELAY");
        }
        let hang_up = HangUp(Arc::new(Notify::new()));
        let (peer, router) = (Peer(self.peer), self.router);
        let extensions = (peer, hang_up.clone());
        let service = hyper::service::service_fn(move |request: Request<Incoming>| {
            call(router.clone(), request, extensions.clone())
        });
        let mut io = TokioIo::new(socket);
        let result = {
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(Duration::from_secs(self.limits.read_timeout_s.into()))
                .max_headers(HEADERS_MAX)
                .max_header_size(HEAD_BYTES_MAX)
                .serve_connection(StallGuard::new(&mut io, WRITE_STALL), service);
            tokio::pin!(connection);
            let mut told = false;
            loop {
                tokio::select! {
                    result = connection.as_mut() => break result,
                    () = close_wish(&mut closing, &hang_up), if !told => {
                        told = true;
                        connection.as_mut().graceful_shutdown();
                    }
                }
            }
        };
        if let Err(error) = result {
            tracing::debug!(peer = %self.peer, %error, "connection ended");
        }
        linger::close(io.into_inner()).await;
        drop(self.seat);
    }
}

async fn close_wish(closing: &mut watch::Receiver<bool>, hang_up: &HangUp) {
    tokio::select! {
        // An error means that the server is gone: close as well.
        _ = closing.wait_for(|closing| *closing) => {}
        () = hang_up.0.notified() => {}
    }
}

async fn call(
    mut router: Router,
    request: Request<Incoming>,
    (peer, hang_up): (Peer, HangUp),
) -> Result<Response<Body>, Infallible> {
    let mut request = request.map(Body::new);
    request.extensions_mut().insert(peer);
    request.extensions_mut().insert(hang_up);
    router.call(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fixed_answer_declares_its_own_length() {
        let text = std::str::from_utf8(FULL).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(
            head.contains(&format!("content-length: {}\r\n", body.len())),
            "{}",
            body.len()
        );
        assert!(serde_json::from_str::<serde_json::Value>(body).is_ok());
    }
}
