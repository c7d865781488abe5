//! The hub's routes: which files a repository has, and a file from a byte on.
//!
//! Redirects are followed here, because the token goes to the hub alone, and because what the hub
//! says of a file stands in its redirect.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde::Deserialize;
use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

use super::super::is_cancelled;
use super::{HubAccess, HubError, is_model_path};

const CONNECT: Duration = Duration::from_secs(15);
/// A line that brings nothing for this long is given up, and the download goes on with a new one.
const SILENCE: Duration = Duration::from_secs(30);
const REDIRECTS_MAX: u32 = 8;
const LISTING_BYTES_MAX: u64 = 16 << 20;
/// Tries of the listing, where the hub is busy or does not answer.
const LISTING_TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(200);

/// What a hub says of a repository.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) commit: Option<String>,
    pub(super) files: Vec<Listed>,
}

/// A file of a repository.
#[derive(Debug, Clone)]
pub(super) struct Listed {
    pub(super) path: String,
    pub(super) bytes: Option<u64>,
    pub(super) sha256: Option<String>,
}

impl Listing {
    /// The GGUF files that have a name which can be a path here.
    pub(super) fn models(&self) -> impl Iterator<Item = &Listed> {
        self.files.iter().filter(|file| is_model_path(&file.path))
    }
}

#[derive(Deserialize)]
struct Repository {
    sha: Option<String>,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    size: Option<u64>,
    sha256: Option<String>,
}

/// A file's address, and what the listing says of it.
#[derive(Debug)]
pub(super) struct RemoteFile {
    url: String,
    pub(super) listed: Listed,
}

/// An answer with the bytes of a file.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: Body,
    /// First byte and all bytes, where the answer is a part.
    pub(super) range: Option<(u64, u64)>,
    /// Size and SHA-256 as the hub told them with its redirect.
    pub(super) told: (Option<u64>, Option<String>),
}

/// A hub over HTTP.
pub(super) struct Http {
    agent: Agent,
    access: HubAccess,
}

impl Http {
    pub(super) fn new(access: &HubAccess) -> Self {
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .user_agent(concat!("rootstock/", env!("CARGO_PKG_VERSION")))
            .build();
        Self {
            agent: agent.into(),
            access: access.clone(),
        }
    }

    /// The files of a repository.
    pub(super) fn listing(
        &self,
        repository: &str,
        revision: &str,
        cancel: &AtomicBool,
    ) -> Result<Listing, HubError> {
        let endpoint = &self.access.endpoint;
        let url = format!("{endpoint}/api/models/{repository}/revision/{revision}?blobs=true");
        let what = format!("{repository} (revision {revision})");
        let mut tries = 0;
        let mut body = loop {
            tries += 1;
            let answer = self.get(&url, None);
            if is_cancelled(cancel) {
                return Err(HubError::Stopped);
            }
            match answer {
                Ok((answer, _)) if answer.status().is_success() => break answer.into_body(),
                Ok((answer, _)) if tries == LISTING_TRIES || !is_busy(answer.status().as_u16()) => {
                    return Err(self.refused(answer.status().as_u16(), what));
                }
                Err(error) if tries == LISTING_TRIES => return Err(error),
                Ok(_) | Err(_) => std::thread::sleep(PAUSE * tries),
            }
        };
        let text = body.with_config().limit(LISTING_BYTES_MAX).read_to_vec();
        let text = text.map_err(|error| self.unreachable(&error))?;
        let repository: Repository =
            serde_json::from_slice(&text).map_err(|error| HubError::Answer {
                what,
                detail: error.to_string(),
            })?;
        let files = repository.siblings.into_iter().map(|file| {
            let (bytes, sha256) = match file.lfs {
                Some(lfs) => (lfs.size.or(file.size), lfs.sha256),
                None => (file.size, None),
            };
            Listed {
                path: file.rfilename,
                bytes,
                sha256: sha256.and_then(|text| sha256_in(&text)),
            }
        });
        Ok(Listing {
            // It becomes part of an address.
            commit: repository
                .sha
                .filter(|sha| sha.len() == 40 && sha.bytes().all(|byte| byte.is_ascii_hexdigit())),
            files: files.collect(),
        })
    }

    /// A file of a repository at a commit.
    pub(super) fn file(&self, repository: &str, commit: &str, listed: &Listed) -> RemoteFile {
        let path = listed.path.replace('+', "%2B").replace(' ', "%20");
        RemoteFile {
            url: format!(
                "{}/{repository}/resolve/{commit}/{path}",
                self.access.endpoint
            ),
            listed: listed.clone(),
        }
    }

    /// The bytes of a file from one on.
    pub(super) fn read(&self, file: &RemoteFile, from: u64) -> Result<Answer, HubError> {
        let (answer, told) = self.get(&file.url, Some(from))?;
        let status = answer.status().as_u16();
        if !matches!(status, 200 | 206 | 416) && !is_busy(status) {
            return Err(self.refused(status, file.listed.path.clone()));
        }
        let range = header(&answer, "content-range").and_then(content_range);
        Ok(Answer {
            status,
            range,
            told,
            body: answer.into_body(),
        })
    }

    /// An answer after all redirects, with the size and the digest that one of them told.
    #[expect(clippy::type_complexity, reason = "one caller with each half")]
    fn get(
        &self,
        url: &str,
        from: Option<u64>,
    ) -> Result<(Response<Body>, (Option<u64>, Option<String>)), HubError> {
        let mut url = url.to_owned();
        let mut told = (None, None);
        for _ in 0..=REDIRECTS_MAX {
            let mut request = self.agent.get(&url).header("accept-encoding", "identity");
            if let Some(from) = from {
                request = request.header("range", format!("bytes={from}-"));
            }
            if let Some(token) = &self.access.token
                && is_of(&url, &self.access.endpoint)
            {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let answer = request.call().map_err(|error| self.unreachable(&error))?;
            told.0 = told
                .0
                .or(header(&answer, "x-linked-size").and_then(|size| size.parse().ok()));
            told.1 = told
                .1
                .or(header(&answer, "x-linked-etag").and_then(sha256_in));
            match header(&answer, "location") {
                Some(to) if answer.status().is_redirection() => url = absolute(&url, to),
                Some(_) | None => return Ok((answer, told)),
            }
        }
        Err(HubError::Network {
            endpoint: self.access.endpoint.clone(),
            detail: format!("more than {REDIRECTS_MAX} redirects"),
        })
    }

    fn refused(&self, status: u16, what: String) -> HubError {
        match status {
            401 => HubError::Unauthorized {
                what,
                with_token: self.access.token.is_some(),
            },
            403 => HubError::Forbidden { what },
            404 => HubError::NotFound { what },
            status => HubError::Status { what, status },
        }
    }

    fn unreachable(&self, error: &ureq::Error) -> HubError {
        HubError::Network {
            endpoint: self.access.endpoint.clone(),
            detail: error.to_string(),
        }
    }
}

/// Answers after which another try may succeed.
pub(super) fn is_busy(status: u16) -> bool {
    matches!(status, 408 | 425 | 429 | 500 | 502 | 503 | 504)
}

fn header<'a>(answer: &'a Response<Body>, name: &str) -> Option<&'a str> {
    answer.headers().get(name)?.to_str().ok()
}

/// `bytes FIRST-LAST/ALL`.
fn content_range(text: &str) -> Option<(u64, u64)> {
    let (part, all) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, _) = part.split_once('-')?;
    Some((first.parse().ok()?, all.parse().ok()?))
}

/// A SHA-256 in hex, which may be quoted; other tags of a file are none.
fn sha256_in(text: &str) -> Option<String> {
    let text = text.trim_matches('"');
    let is_one = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_one.then(|| text.to_ascii_lowercase())
}

/// Whether an address has the scheme, host and port of another.
fn is_of(url: &str, endpoint: &str) -> bool {
    let place = |url: &str| {
        let url: Uri = url.parse().ok()?;
        Some((url.scheme_str()?.to_owned(), url.authority()?.to_string()))
    };
    place(url).is_some_and(|at| place(endpoint) == Some(at))
}

/// Where a redirect leads.
fn absolute(from: &str, to: &str) -> String {
    if !to.starts_with('/') {
        return to.to_owned();
    }
    let scheme_end = from.find("://").map_or(0, |at| at + 3);
    if to.starts_with("//") {
        let scheme = from.get(..scheme_end.saturating_sub(2)).unwrap_or_default();
        return format!("{scheme}{to}");
    }
    let rest = from.get(scheme_end..).unwrap_or_default();
    let host_end = rest.find('/').map_or(from.len(), |at| scheme_end + at);
    format!("{}{to}", from.get(..host_end).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_lead_to_a_host_a_scheme_or_a_path() {
        let from = "https://hub:1/a/b?c";
        assert_eq!(absolute(from, "http://x/y"), "http://x/y");
        assert_eq!(absolute(from, "//x/y"), "https://x/y");
        assert_eq!(absolute(from, "/y"), "https://hub:1/y");
        assert_eq!(absolute("https://hub", "/y"), "https://hub/y");
    }

    #[test]
    fn a_token_is_for_the_same_scheme_host_and_port_only() {
        assert!(is_of("https://hub/x", "https://hub"));
        assert!(!is_of("http://hub/x", "https://hub"));
        assert!(!is_of("https://hub:8/x", "https://hub"));
        assert!(!is_of("https://hub.evil/x", "https://hub"));
        assert!(!is_of("https://hub@evil/x", "https://hub"));
        assert!(!is_of("nonsense", "nonsense"));
    }

    #[test]
    fn ranges_and_digests_are_read_or_absent() {
        assert_eq!(content_range("bytes 7-9/10"), Some((7, 10)));
        assert_eq!(content_range("bytes */10"), None);
        assert_eq!(content_range("bytes 7-9/*"), None);
        let digest = "A".repeat(64);
        assert_eq!(sha256_in(&format!("\"{digest}\"")), Some("a".repeat(64)));
        assert_eq!(sha256_in("\"W/0\""), None);
    }
}
