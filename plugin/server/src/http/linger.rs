//! The end of a connection whose client may still be sending.
//!
//! A socket that is closed while bytes of the client lie unread resets the connection, and the
//! reset can overtake the answer: who sent too much would see a broken connection instead of the
//! 413 that says why. So the sending side is closed first, and what still comes is read and
//! dropped for a while.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long a client that goes on sending is listened to.
const PATIENCE: Duration = Duration::from_secs(1);

/// Closes the sending side, then reads until the client closes its own, at most for a second.
/// Errors are the end of the connection too.
pub async fn close(mut socket: TcpStream) {
    if socket.shutdown().await.is_err() {
        return;
    }
    // Within the limit or not, the socket is closed by its drop.
    drop(timeout(PATIENCE, drain(&mut socket)).await);
}

async fn drain(socket: &mut TcpStream) {
    let mut dropped = vec![0; 16 << 10];
    while socket.read(&mut dropped).await.is_ok_and(|read| read > 0) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_client_that_still_sends_reads_the_answer_to_its_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut client = TcpStream::connect(address).await.unwrap();
        let (mut socket, _) = listener.accept().await.unwrap();
        client.write_all(&[b'x'; 4096]).await.unwrap();
        socket.write_all(b"no more").await.unwrap();
        let closing = tokio::spawn(close(socket));
        // Unread bytes of the client lie at the server while it closes, and more come.
        client.write_all(&[b'x'; 4096]).await.unwrap();
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, b"no more");
        client.write_all(&[b'x'; 4096]).await.unwrap();
        drop(client);
        closing.await.unwrap();
    }
}
