//! A socket that gives up on a client which stopped reading.
//!
//! Answers are bounded and wait in memory, but a peer that never reads would keep its connection
//! for ever. When a write has made no progress for the limit, it fails and the connection ends.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::time::{Instant, Sleep};

/// Wraps the socket of one connection.
#[derive(Debug)]
pub struct StallGuard<T> {
    socket: T,
    limit: Duration,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<T> StallGuard<T> {
    /// Writes of `socket` fail after `limit` without progress.
    pub fn new(socket: T, limit: Duration) -> StallGuard<T> {
        StallGuard {
            socket,
            limit,
            timer: None,
        }
    }

    /// Passes a finished write on, and a waiting one until the limit.
    fn guard<R>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let limit = self.limit;
        let timer = self.timer.get_or_insert_with(|| {
            // Through the runtime's clock, so that tests can pause it.
            Box::pin(tokio::time::sleep_until(Instant::now() + limit))
        });
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client stopped reading",
        )))
    }
}

impl<T: Read + Unpin> Read for StallGuard<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, buffer)
    }
}

impl<T: Write + Unpin> Write for StallGuard<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.guard(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.socket).poll_flush(cx);
        self.guard(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = Pin::new(&mut self.socket).poll_shutdown(cx);
        self.guard(cx, closed)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, bytes);
        self.guard(cx, written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Never takes a byte.
    struct Deaf;

    impl Write for Deaf {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &[u8],
        ) -> Poll<io::Result<usize>> {
            Poll::Pending
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_without_progress_fails_at_the_limit() {
        let mut guard = StallGuard::new(Deaf, Duration::from_secs(60));
        let write = std::future::poll_fn(|cx| Pin::new(&mut guard).poll_write(cx, b"x"));
        let error = write.await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
