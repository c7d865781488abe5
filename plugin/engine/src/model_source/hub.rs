//! A model in a repository of the Hugging Face hub, or of a server that speaks its routes.
//!
//! ```text
//! GET HUB/api/models/ORG/REPO/revision/REVISION?blobs=true   files, with size and SHA-256
//! GET HUB/ORG/REPO/resolve/COMMIT/FILE                       redirects to the bytes
//! ```
//!
//! The file is downloaded by ranges into a file that is named by its SHA-256, so that what one
//! start did not finish the next one continues, and nothing of another version is ever continued.
//! It gets its name when size and digest are those that the hub told. What is in the cache is used
//! without asking the hub: a branch that has moved on is another REVISION, or another cache.

mod choose;
mod error;
mod http;
mod part;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

pub use error::HubError;

use super::spec::is_model_path;
use super::{HubFile, Progress, SourceError, digest};
use http::Http;

/// Where models come from when nobody says otherwise.
const HUB: &str = "https://huggingface.co";

/// The branch that a hub shows.
const MAIN: &str = "main";

/// The file that says what was taken when none was named.
const CHOSEN: &str = ".chosen";

/// A hub, and who asks it.
#[derive(Clone)]
pub struct HubAccess {
    endpoint: String,
    token: Option<String>,
}

impl HubAccess {
    /// The hub at an address, and the token that it gets, but nobody that it redirects to.
    #[must_use]
    pub fn new(endpoint: &str, token: Option<&str>) -> Self {
        let token = token.map(str::trim).filter(|token| !token.is_empty());
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.map(str::to_owned),
        }
    }

    /// `$HF_ENDPOINT` and `$HF_TOKEN`.
    #[must_use]
    pub fn of_environment() -> Self {
        let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_default();
        let endpoint = match endpoint.trim() {
            "" => HUB,
            endpoint => endpoint,
        };
        Self::new(endpoint, std::env::var("HF_TOKEN").ok().as_deref())
    }
}

impl Default for HubAccess {
    fn default() -> Self {
        Self::new(HUB, None)
    }
}

impl fmt::Debug for HubAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "(hidden)");
        f.debug_struct("HubAccess")
            .field("endpoint", &self.endpoint)
            .field("token", &token)
            .finish()
    }
}

/// A model that is in its folder now.
#[derive(Debug)]
pub(super) struct Fetched {
    pub(super) path: PathBuf,
    pub(super) sha256: String,
}

/// The folder of a repository below that of the hub's models.
pub(super) fn folder_name(wanted: &HubFile) -> String {
    match wanted.revision() {
        Some(revision) => format!("{}@{revision}", wanted.repository()),
        None => wanted.repository(),
    }
}

/// The wanted file in its folder; where none is named, that which was chosen before.
pub(super) fn find_cached(folder: &Path, wanted: &HubFile) -> Option<PathBuf> {
    let chosen;
    let file = match wanted.file() {
        Some(file) => file,
        None => {
            chosen = fs::read_to_string(folder.join(CHOSEN)).ok()?;
            Some(chosen.trim()).filter(|file| is_model_path(file))?
        }
    };
    Some(folder.join(file)).filter(|path| path.is_file())
}

/// Downloads the wanted file into its folder.
pub(super) fn fetch(
    access: &HubAccess,
    wanted: &HubFile,
    folder: &Path,
    progress: &mut dyn FnMut(Progress),
    cancel: &AtomicBool,
) -> Result<Fetched, SourceError> {
    let http = Http::new(access);
    let repository = wanted.repository();
    let revision = wanted.revision().unwrap_or(MAIN);
    let listing = http.listing(&repository, revision, cancel)?;
    let listed = choose::choose(&listing, wanted)?;
    if wanted.file().is_none() {
        let found = listing.models().count();
        tracing::info!(repository, file = %listed.path, found, "chosen of the GGUF files");
    }
    let failed = |source| SourceError::Cache {
        path: folder.to_owned(),
        source,
    };
    // By the commit that was listed: a branch may move between the two requests.
    let commit = listing.commit.as_deref().unwrap_or(revision);
    let from = http.file(&repository, commit, &listed);
    let whole = part::download(&http, &from, &folder.join(".partial"), progress, cancel)?;
    let path = folder.join(&listed.path);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    fs::rename(&whole.path, &path).map_err(failed)?;
    digest::note(&path, &whole.sha256).map_err(failed)?;
    if wanted.file().is_none() {
        fs::write(folder.join(CHOSEN), format!("{}\n", listed.path)).map_err(failed)?;
    }
    if let Err(error) = fs::remove_dir_all(folder.join(".partial")) {
        tracing::debug!(folder = %folder.display(), %error, "an empty folder stays");
    }
    Ok(Fetched {
        path,
        sha256: whole.sha256,
    })
}
