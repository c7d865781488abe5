//! A file that is coming: what is there of it, and the rest by ranges, until it is whole and is
//! what the hub told.
//!
//! A try that brought much counts as none: a line that breaks every few minutes still brings a
//! large model. A server without ranges begins from the start each time, and so runs out of tries.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::super::digest::hex;
use super::super::is_cancelled;
use super::http::{Answer, Http, RemoteFile, is_busy};
use super::{HubError, Progress};

/// Tries in a row that bring less than [`MUCH`].
const TRIES: u32 = 5;
const MUCH: u64 = 1 << 20;
const PAUSE: Duration = Duration::from_millis(200);
const STEP_BYTES: usize = 1 << 18;

/// A file that is whole, and not yet in its place.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) path: PathBuf,
    pub(super) sha256: String,
}

/// Downloads a file into a folder of its own.
pub(super) fn download(
    http: &Http,
    from: &RemoteFile,
    folder: &Path,
    progress: &mut dyn FnMut(Progress),
    cancel: &AtomicBool,
) -> Result<Whole, HubError> {
    let mut part = Part::open(folder, from, progress, cancel)?;
    let mut tries = 0;
    loop {
        let before = part.bytes;
        let ended = match http.read(from, part.bytes) {
            Ok(answer) if is_busy(answer.status) => Err(format!("status {}", answer.status)),
            Ok(answer) => part.take(answer, progress, cancel)?,
            Err(HubError::Network { detail, .. }) => Err(detail),
            Err(error) => return Err(error),
        };
        if is_cancelled(cancel) {
            return Err(HubError::Stopped);
        }
        let Err(detail) = ended else {
            return part.finish();
        };
        if part.bytes.saturating_sub(before) >= MUCH {
            tries = 0;
        }
        tries += 1;
        if tries == TRIES {
            return Err(HubError::Cut {
                file: part.file,
                bytes: part.bytes,
                total: part.total,
                tries,
                detail,
            });
        }
        tracing::warn!(
            file = part.file,
            bytes = part.bytes,
            detail,
            "the download goes on"
        );
        if part.bytes <= before {
            std::thread::sleep(PAUSE * tries);
        }
    }
}

/// What is there of a file.
struct Part {
    file: String,
    path: PathBuf,
    out: File,
    hash: Sha256,
    bytes: u64,
    total: Option<u64>,
    sha256: Option<String>,
}

impl Part {
    /// What an earlier start left of the same bytes, and nothing else; without a digest there is
    /// no telling what is the same.
    fn open(
        folder: &Path,
        from: &RemoteFile,
        progress: &mut dyn FnMut(Progress),
        cancel: &AtomicBool,
    ) -> Result<Part, HubError> {
        let listed = &from.listed;
        let name = listed.sha256.as_deref().unwrap_or("unnamed");
        let path = folder.join(format!("{name}.part"));
        let disk = |source| HubError::Disk {
            path: path.clone(),
            source,
        };
        fs::create_dir_all(folder).map_err(disk)?;
        for entry in fs::read_dir(folder).map_err(disk)? {
            let other = entry.map_err(disk)?.path();
            if other != path || listed.sha256.is_none() {
                fs::remove_file(&other).map_err(disk)?;
            }
        }
        let mut options = OpenOptions::new();
        let options = options.read(true).append(true).create(true);
        let mut out = options.open(&path).map_err(disk)?;
        let there = out.metadata().map_err(disk)?.len();
        if listed.bytes.is_some_and(|bytes| there > bytes) {
            out.set_len(0).map_err(disk)?;
        }
        let mut hash = Sha256::new();
        let bytes = hash_all(&mut out, &mut hash, progress, cancel).map_err(disk)?;
        if is_cancelled(cancel) {
            return Err(HubError::Stopped);
        }
        Ok(Part {
            file: listed.path.clone(),
            out,
            hash,
            bytes,
            total: listed.bytes,
            sha256: listed.sha256.clone(),
            path,
        })
    }

    /// Takes what an answer has. `Ok` when that was the end of the file; why it was not, otherwise.
    fn take(
        &mut self,
        mut answer: Answer,
        progress: &mut dyn FnMut(Progress),
        cancel: &AtomicBool,
    ) -> Result<Result<(), String>, HubError> {
        let all = match (answer.status, answer.range) {
            (206, Some((first, all))) if first == self.bytes => Some(all),
            (206, _) => return Ok(Err("another part came than was asked for".to_owned())),
            // No byte is left: the file is whole, or what is here is of something else.
            (416, _) if self.total == Some(self.bytes) => return Ok(Ok(())),
            (416, _) => {
                self.restart()?;
                return Ok(Err("the hub has fewer bytes than are here".to_owned()));
            }
            _ => {
                self.restart()?;
                answer.body.content_length()
            }
        };
        let (bytes, sha256) = answer.told;
        self.total = self.total.or(bytes).or(all);
        self.sha256 = self.sha256.take().or(sha256);
        if let (Some(found), Some(wanted)) = (all, self.total)
            && found != wanted
        {
            return Err(self.wrong_size(found, wanted));
        }
        let mut reader = answer.body.as_reader();
        let mut buffer = vec![0; STEP_BYTES];
        while !is_cancelled(cancel) {
            let count = match reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) => return Ok(Err(error.to_string())),
            };
            let chunk = buffer.get(..count).unwrap_or_default();
            self.out
                .write_all(chunk)
                .map_err(|error| self.disk(error))?;
            self.hash.update(chunk);
            self.bytes += count as u64;
            if let Some(total) = self.total
                && self.bytes > total
            {
                return Err(self.wrong_size(self.bytes, total));
            }
            progress(Progress::Downloading {
                bytes: self.bytes,
                total: self.total,
            });
        }
        Ok(match self.total {
            Some(total) if self.bytes < total => Err("the connection ended".to_owned()),
            Some(_) | None => Ok(()),
        })
    }

    /// Whole, and what the hub told, or gone.
    fn finish(self) -> Result<Whole, HubError> {
        let found = hex(&self.hash.clone().finalize());
        if let Some(wanted) = &self.sha256
            && *wanted != found
        {
            let wanted = wanted.clone();
            let file = self.file.clone();
            self.remove();
            return Err(HubError::Digest {
                file,
                found,
                wanted,
            });
        }
        if self.sha256.is_none() {
            tracing::warn!(file = self.file, "the hub told no SHA-256 to compare with");
        }
        self.out.sync_all().map_err(|error| self.disk(error))?;
        Ok(Whole {
            path: self.path,
            sha256: found,
        })
    }

    fn restart(&mut self) -> Result<(), HubError> {
        self.out.set_len(0).map_err(|error| self.disk(error))?;
        self.hash = Sha256::new();
        self.bytes = 0;
        Ok(())
    }

    fn wrong_size(&self, found: u64, wanted: u64) -> HubError {
        self.remove();
        HubError::Size {
            file: self.file.clone(),
            found,
            wanted,
        }
    }

    fn remove(&self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "a wrong download stays");
        }
    }

    fn disk(&self, source: io::Error) -> HubError {
        HubError::Disk {
            path: self.path.clone(),
            source,
        }
    }
}

/// Hashes a file to its end.
fn hash_all(
    file: &mut File,
    hash: &mut Sha256,
    progress: &mut dyn FnMut(Progress),
    cancel: &AtomicBool,
) -> io::Result<u64> {
    let total = file.metadata()?.len();
    let mut buffer = vec![0; STEP_BYTES];
    let mut bytes = 0;
    while !is_cancelled(cancel) {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        hash.update(buffer.get(..count).unwrap_or_default());
        bytes += count as u64;
        progress(Progress::Verifying { bytes, total });
    }
    Ok(bytes)
}
