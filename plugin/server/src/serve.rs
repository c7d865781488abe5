//! Running the server: from a bound socket to the end of the drain. Signals are the caller's
//! business; the library never touches them.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpSocket, lookup_host};

use crate::app::App;
use crate::http::listener;

/// Connections the system keeps waiting for us.
const BACKLOG: u32 = 1024;
/// How long requests cut by the drain deadline may take to say so.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// An address that is ours, on which nobody is answered yet: a port in use is noticed before a
/// model is loaded, and clients are refused, not kept waiting, until there is one.
#[derive(Debug)]
pub struct Bound(TcpSocket);

impl Bound {
    /// Takes an address.
    ///
    /// # Errors
    /// When the name does not resolve or the address is not to be had.
    pub async fn new(host: &str, port: u16) -> Result<Bound, BindError> {
        let failed = |source| BindError {
            address: address(host, port),
            source,
        };
        let found = lookup_host((host, port)).await.map_err(failed)?;
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in found {
            match bind(address) {
                Ok(socket) => return Ok(Bound(socket)),
                Err(error) => last = error,
            }
        }
        Err(failed(last))
    }

    /// Starts to take connections.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn listen(self) -> io::Result<TcpListener> {
        self.0.listen(BACKLOG)
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    // A restart need not wait for old connections to time out; a port that somebody listens on
    // is refused all the same.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

fn address(host: &str, port: u16) -> String {
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// An address that cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {source}{}", self.remedy())]
pub struct BindError {
    address: String,
    source: io::Error,
}

impl BindError {
    fn remedy(&self) -> &'static str {
        let kind = self.source.kind();
        if kind == io::ErrorKind::AddrInUse {
            "; stop the other server or choose another --port"
        } else if kind == io::ErrorKind::PermissionDenied {
            "; ports below 1024 need root"
        } else {
            ""
        }
    }
}

/// Serves until `shutdown` resolves, then drains: running requests finish, new ones get 503, and
/// what is left at the deadline ends with an error. Returns when the last connection is closed,
/// with what is left until the deadline.
pub async fn run(
    app: Arc<App>,
    listener: TcpListener,
    shutdown: impl Future<Output = ()>,
) -> Duration {
    let began = Arc::new(OnceLock::new());
    let stop = drain(Arc::clone(&app), shutdown, Arc::clone(&began));
    listener::serve(listener, app.router(), app.limits, stop).await;
    let patience = Duration::from_secs(app.limits.drain_timeout_s.into());
    let used = began.get().map_or(Duration::ZERO, Instant::elapsed);
    patience.saturating_sub(used)
}

async fn drain(app: Arc<App>, shutdown: impl Future<Output = ()>, began: Arc<OnceLock<Instant>>) {
    shutdown.await;
    began.get_or_init(crate::clock::now);
    let running = app.life.live();
    tracing::info!(running, "draining");
    app.life.start_drain();
    let patience = Duration::from_secs(app.limits.drain_timeout_s.into());
    if tokio::time::timeout(patience, app.life.idle())
        .await
        .is_ok()
    {
        return;
    }
    tracing::warn!(
        running = app.life.live(),
        "drain deadline passed, ending what still runs"
    );
    app.life.expire();
    if tokio::time::timeout(LAST_WORDS, app.life.idle())
        .await
        .is_err()
    {
        tracing::warn!("requests did not end in time");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_in_use_is_one_clear_line() {
        let taken = Bound::new("127.0.0.1", 0).await.unwrap().listen().unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = Bound::new("127.0.0.1", port).await.unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("cannot listen on 127.0.0.1:{port}: ")),
            "{error}"
        );
        assert!(
            error.ends_with("choose another --port") && !error.contains('\n'),
            "{error}"
        );
    }
}
