//! Where a socket listens: `tcp://HOST:PORT`, with `*` for all addresses.

use std::fmt;
use std::str::FromStr;

/// An address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    port: u16,
}

/// Not an address to listen on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is no endpoint; wanted tcp://HOST:PORT, for example tcp://127.0.0.1:5557")]
pub struct EndpointError {
    found: String,
}

impl Endpoint {
    /// The endpoint whose port is one higher, if there is one.
    pub fn next_port(&self) -> Option<Endpoint> {
        let port = self.port.checked_add(1).filter(|_| self.port > 0)?;
        Some(Endpoint {
            host: self.host.clone(),
            port,
        })
    }

    /// The host as the resolver takes it.
    pub fn host(&self) -> &str {
        if self.host == "*" {
            "0.0.0.0"
        } else {
            self.host.trim_start_matches('[').trim_end_matches(']')
        }
    }

    /// The port; 0 takes any free one.
    pub const fn port(&self) -> u16 {
        self.port
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Endpoint, EndpointError> {
        let parsed = || {
            let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
            let bare = host
                .strip_prefix('[')
                .and_then(|host| host.strip_suffix(']'));
            let usable = match bare {
                Some(inner) => inner.contains(':'),
                None => !host.is_empty() && !host.contains([':', '/', '[', ']']),
            };
            let port = if port == "*" { 0 } else { port.parse().ok()? };
            usable.then(|| Endpoint {
                host: host.to_owned(),
                port,
            })
        };
        parsed().ok_or_else(|| EndpointError {
            found: text.to_owned(),
        })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp://{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_and_written_alike() {
        for text in [
            "tcp://127.0.0.1:5557",
            "tcp://*:1",
            "tcp://[::1]:0",
            "tcp://host:9",
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!(endpoint.to_string(), text);
        }
        assert_eq!("tcp://*:1".parse::<Endpoint>().unwrap().host(), "0.0.0.0");
        assert_eq!("tcp://[::1]:1".parse::<Endpoint>().unwrap().host(), "::1");
    }

    #[test]
    fn what_is_no_endpoint_is_told_with_an_example() {
        for text in [
            "",
            "127.0.0.1:1",
            "tcp://:1",
            "tcp://::1:1",
            "tcp://h",
            "tcp://h:70000",
        ] {
            let error = text.parse::<Endpoint>().unwrap_err().to_string();
            assert!(error.contains("tcp://127.0.0.1:5557"), "{error}");
        }
        assert!("ipc:///tmp/x".parse::<Endpoint>().is_err());
    }

    #[test]
    fn the_replay_port_follows_the_port() {
        let next = |text: &str| text.parse::<Endpoint>().unwrap().next_port();
        assert_eq!(next("tcp://h:5557").unwrap().port(), 5558);
        assert_eq!(next("tcp://h:65535"), None);
        assert_eq!(next("tcp://h:0"), None);
    }
}
