//! Why a hub gives no model. Each message ends with what can be done.

use std::path::PathBuf;

/// Why a hub gave no model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are named by the messages")]
pub enum HubError {
    /// Nobody answers, or not in the way of HTTP.
    #[error(
        "the hub cannot be reached at {endpoint} ({detail}); check the network, the proxy and \
         HF_ENDPOINT, or give the path of a GGUF file (`--model FILE`)"
    )]
    Network { endpoint: String, detail: String },
    /// Not known, or not for everybody.
    #[error(
        "the hub answers 401 for {what}: there is no such repository, or it is not public; check \
         its name, or set HF_TOKEN to a token that may read it{}",
        if *with_token { " (the one that is set may not)" } else { "" }
    )]
    Unauthorized { what: String, with_token: bool },
    /// Known, and refused.
    #[error(
        "the hub answers 403 for {what}: accept its terms on the hub's page of it, and set \
         HF_TOKEN to a token of that account"
    )]
    Forbidden { what: String },
    /// Not known.
    #[error("the hub answers 404 for {what}; check the name, the revision and HF_ENDPOINT")]
    NotFound { what: String },
    /// Anything else that is no success.
    #[error("the hub answers {status} for {what}; try again later")]
    Status { what: String, status: u16 },
    /// An answer in another form than the hub's.
    #[error("the hub's answer for {what} is not understood: {detail}; check HF_ENDPOINT")]
    Answer { what: String, detail: String },
    /// The repository has no such file.
    #[error("{repository} has no file {wanted}; its GGUF files are: {found}")]
    NoFile {
        repository: String,
        wanted: String,
        found: String,
    },
    /// Several files, and none is named.
    #[error("{repository} has several GGUF files; name one (hf:{repository}:FILE): {found}")]
    Ambiguous { repository: String, found: String },
    /// One part of a model in several files.
    #[error(
        "{file} is one part of a model in several files, which are not read; take a model in one \
         file, or join them into one and give its path (`--model FILE`)"
    )]
    Split { file: String },
    /// The download stopped again and again.
    #[error(
        "the download of {file} stopped at {bytes} of {} bytes, {tries} times ({detail}); start \
         again, and it goes on from there",
        total.map_or_else(|| "unknown".to_owned(), |total| total.to_string())
    )]
    Cut {
        file: String,
        bytes: u64,
        total: Option<u64>,
        tries: u32,
        detail: String,
    },
    /// The caller gave up.
    #[error("the download was stopped; the next start goes on from there")]
    Stopped,
    /// More or fewer bytes than the hub told.
    #[error(
        "{file} comes with {found} bytes, the hub told {wanted}; nothing of it was kept; try again \
         later, or give the path of a GGUF file (`--model FILE`)"
    )]
    Size {
        file: String,
        found: u64,
        wanted: u64,
    },
    /// Other bytes than the hub told.
    #[error(
        "{file} came with SHA-256 {found}, the hub told {wanted}; nothing of it was kept; try \
         again, or give the path of a GGUF file (`--model FILE`)"
    )]
    Digest {
        file: String,
        found: String,
        wanted: String,
    },
    /// The disk.
    #[error("{} cannot be written; set ROOTSTOCK_CACHE to another folder", path.display())]
    Disk {
        path: PathBuf,
        source: std::io::Error,
    },
}
