//! ZMTP 3.0 as a server speaks it: greeting, `NULL` handshake, frames. What ZeroMQ's PUB and
//! ROUTER sockets put on a TCP connection, and no socket of ZeroMQ's with a queue of its own.
//!
//! ```text
//! greeting  FF 00*8 7F | 03 00 | "NULL" padded to 20 | 00 | 00*31             64 bytes, both ways
//! frame     flags (1 more, 2 long, 4 command) | length: 1 byte, or 8 if long | body
//! command   length of its name | name | data          READY, ERROR, SUBSCRIBE, CANCEL, PING, PONG
//! ```

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Bytes of a frame that a peer may send. Subscriptions and requests are a few bytes.
const FRAME_BYTES_MAX: u64 = 4096;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Why a connection ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(super) enum ZmtpError {
    /// The connection broke.
    #[error("connection: {0}")]
    Io(#[from] io::Error),
    /// Not ZMTP 3, or another mechanism than `NULL`.
    #[error("the peer does not greet as ZMTP 3 with the NULL mechanism")]
    Greeting,
    /// A socket that does not go with ours.
    #[error("the peer is a {found} socket, this one talks to {wanted}")]
    SocketType {
        /// Its type.
        found: String,
        /// Types that go.
        wanted: &'static str,
    },
    /// A frame that is none.
    #[error("a frame of {bytes} bytes with flags {flags:#04x}; at most {FRAME_BYTES_MAX} bytes")]
    Frame {
        /// Its length.
        bytes: u64,
        /// Its first byte.
        flags: u8,
    },
    /// The handshake took too long.
    #[error("no handshake in time")]
    Late,
}

/// The sockets that are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Publishes to SUB and XSUB.
    Publisher,
    /// Answers DEALER and REQ.
    Router,
}

impl Role {
    const fn name(self) -> &'static str {
        match self {
            Role::Publisher => "PUB",
            Role::Router => "ROUTER",
        }
    }

    const fn wanted(self) -> &'static str {
        match self {
            Role::Publisher => "SUB or XSUB",
            Role::Router => "DEALER, REQ or ROUTER",
        }
    }

    fn goes_with(self, peer: &str) -> bool {
        match self {
            Role::Publisher => matches!(peer, "SUB" | "XSUB"),
            Role::Router => matches!(peer, "DEALER" | "REQ" | "ROUTER"),
        }
    }
}

/// What a peer sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    /// Another frame of the same message follows.
    pub(super) more: bool,
    /// A command, not a part of a message.
    pub(super) command: bool,
    /// The bytes.
    pub(super) body: Vec<u8>,
}

/// What a peer wants of a publisher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// Messages whose topic begins so.
    Subscribe(Vec<u8>),
    /// No longer those.
    Cancel(Vec<u8>),
    /// An answer with this context.
    Ping(Vec<u8>),
    /// Nothing we know.
    Other,
}

/// Greets and shakes hands.
///
/// # Errors
/// The peer is gone, or is not one to talk to.
pub(super) async fn greet<S>(stream: &mut S, role: Role) -> Result<(), ZmtpError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut greeting = [0_u8; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).await?;
    let mut theirs = [0_u8; 64];
    stream.read_exact(&mut theirs).await?;
    if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || theirs[12..17] != *b"NULL\0" {
        return Err(ZmtpError::Greeting);
    }
    let mut ready = vec![5];
    ready.extend_from_slice(b"READY");
    property(&mut ready, "Socket-Type", role.name());
    let mut out = Vec::new();
    put_frame(&mut out, COMMAND, &ready);
    stream.write_all(&out).await?;
    let frame = read_frame(stream).await?;
    let found = (frame.command)
        .then(|| frame.body.strip_prefix(b"\x05READY"))
        .flatten()
        .and_then(socket_type)
        .ok_or(ZmtpError::Greeting)?;
    if role.goes_with(&found) {
        return Ok(());
    }
    let wanted = role.wanted();
    let reason = format!("wanted {wanted}");
    let mut error = b"\x05ERROR".to_vec();
    error.push(u8::try_from(reason.len()).unwrap_or(u8::MAX));
    error.extend_from_slice(reason.as_bytes());
    out.clear();
    put_frame(&mut out, COMMAND, &error);
    stream.write_all(&out).await?;
    Err(ZmtpError::SocketType { found, wanted })
}

fn property(out: &mut Vec<u8>, name: &str, value: &str) {
    out.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
    out.extend_from_slice(name.as_bytes());
    let len = u32::try_from(value.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&len.to_be_bytes());
    out.extend_from_slice(value.as_bytes());
}

/// The property `Socket-Type` of a `READY` command.
fn socket_type(mut properties: &[u8]) -> Option<String> {
    while let Some((&len, rest)) = properties.split_first() {
        let (name, rest) = rest.split_at_checked(len.into())?;
        let (len, rest) = rest.split_first_chunk::<4>()?;
        let len = usize::try_from(u32::from_be_bytes(*len)).ok()?;
        let (value, rest) = rest.split_at_checked(len)?;
        if name.eq_ignore_ascii_case(b"socket-type") {
            return Some(String::from_utf8_lossy(value).into_owned());
        }
        properties = rest;
    }
    None
}

/// Reads one frame.
///
/// # Errors
/// The peer is gone, or sends what is no frame or too long a one.
pub(super) async fn read_frame<R: AsyncRead + Unpin>(from: &mut R) -> Result<Frame, ZmtpError> {
    let flags = from.read_u8().await?;
    let bytes = if flags & LONG == 0 {
        u64::from(from.read_u8().await?)
    } else {
        from.read_u64().await?
    };
    if flags & !(MORE | LONG | COMMAND) != 0 || bytes > FRAME_BYTES_MAX {
        return Err(ZmtpError::Frame { bytes, flags });
    }
    let mut body = vec![0; usize::try_from(bytes).unwrap_or(0)];
    from.read_exact(&mut body).await?;
    Ok(Frame {
        more: flags & MORE != 0,
        command: flags & COMMAND != 0,
        body,
    })
}

/// Appends a message of these parts.
pub(super) fn put_message(out: &mut Vec<u8>, parts: &[&[u8]]) {
    for (index, part) in parts.iter().enumerate() {
        let flags = if index + 1 < parts.len() { MORE } else { 0 };
        put_frame(out, flags, part);
    }
}

/// Appends the answer to a ping.
pub(super) fn put_pong(out: &mut Vec<u8>, context: &[u8]) {
    put_frame(out, COMMAND, &[b"\x04PONG", context].concat());
}

fn put_frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    if let Ok(len) = u8::try_from(body.len()) {
        out.extend_from_slice(&[flags, len]);
    } else {
        out.push(flags | LONG);
        out.extend_from_slice(&(body.len() as u64).to_be_bytes());
    }
    out.extend_from_slice(body);
}

/// Understands a frame. Subscriptions come as commands, and from older peers as messages.
pub(super) fn wish(frame: &Frame) -> Wish {
    let body = &frame.body;
    if !frame.command {
        return match body.split_first() {
            Some((1, topic)) => Wish::Subscribe(topic.to_vec()),
            Some((0, topic)) => Wish::Cancel(topic.to_vec()),
            Some(_) | None => Wish::Other,
        };
    }
    if let Some(topic) = body.strip_prefix(b"\x09SUBSCRIBE") {
        Wish::Subscribe(topic.to_vec())
    } else if let Some(topic) = body.strip_prefix(b"\x06CANCEL") {
        Wish::Cancel(topic.to_vec())
    } else if let Some(ping) = body.strip_prefix(b"\x04PING") {
        // Two bytes of time to live, then what has to come back.
        Wish::Ping(ping.get(2..).unwrap_or_default().to_vec())
    } else {
        Wish::Other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subscriptions_are_understood_in_both_forms() {
        let frame = |command, body: &[u8]| Frame {
            more: false,
            command,
            body: body.to_vec(),
        };
        let subscribe = Wish::Subscribe(b"kv".to_vec());
        assert_eq!(wish(&frame(false, b"\x01kv")), subscribe);
        assert_eq!(wish(&frame(true, b"\x09SUBSCRIBEkv")), subscribe);
        assert_eq!(wish(&frame(false, b"\0kv")), Wish::Cancel(b"kv".to_vec()));
        assert_eq!(
            wish(&frame(true, b"\x04PING\0\x0aab")),
            Wish::Ping(b"ab".to_vec())
        );
        assert_eq!(wish(&frame(true, b"\x04PING")), Wish::Ping(Vec::new()));
        assert_eq!(wish(&frame(false, b"")), Wish::Other);
    }

    #[tokio::test]
    async fn a_frame_that_announces_too_much_is_refused_before_it_is_read() {
        let bytes = [LONG, 0, 0, 1, 0, 0, 0, 0, 0];
        let error = read_frame(&mut &bytes[..]).await.unwrap_err();
        assert!(
            matches!(error, ZmtpError::Frame { bytes, .. } if bytes == 1 << 40),
            "{error}"
        );
        assert!(read_frame(&mut &[0x80, 0][..]).await.is_err());
        assert!(
            read_frame(&mut &[0, 5, 1][..]).await.is_err(),
            "cut off in the body"
        );
    }

    #[test]
    fn damaged_properties_are_no_socket_type() {
        let mut ready = Vec::new();
        property(&mut ready, "Identity", "");
        property(&mut ready, "Socket-Type", "SUB");
        assert_eq!(socket_type(&ready).as_deref(), Some("SUB"));
        for end in 0..ready.len() {
            assert_eq!(socket_type(&ready[..end]), None, "cut at {end}");
        }
    }
}
