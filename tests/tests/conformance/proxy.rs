//! A TCP proxy that can be cut: while it is, all connections through it are closed.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A way to an address that can be closed and opened.
#[derive(Debug)]
pub(crate) struct Proxy {
    /// Where it listens.
    pub(crate) address: SocketAddr,
    open: Arc<watch::Sender<bool>>,
}

impl Proxy {
    /// An open way to `target`.
    pub(crate) async fn to(target: SocketAddr) -> std::io::Result<Proxy> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let open = Arc::new(watch::Sender::new(true));
        let state = Arc::clone(&open);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut state = state.subscribe();
                if !*state.borrow() {
                    continue;
                }
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(target).await else {
                        return;
                    };
                    tokio::select! {
                        ended = copy_bidirectional(&mut client, &mut server) => drop(ended),
                        closed = state.wait_for(|open| !open) => drop(closed),
                    }
                });
            }
        });
        Ok(Proxy { address, open })
    }

    /// Closes all connections, and new ones at once.
    pub(crate) fn cut(&self) {
        self.open.send_replace(false);
    }

    /// Lets connections through again.
    pub(crate) fn mend(&self) {
        self.open.send_replace(true);
    }
}
