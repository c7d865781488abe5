//! Where the files of a folder store lie until they are whole: a folder of this store's own, so
//! that servers which share a store leave each other's files alone.
//!
//! ```text
//!   .unfinished/PID-N.lock   held by its owner for as long as it lives
//!   .unfinished/PID-N/       what it is writing
//! ```
//! Who opens a store removes what belongs to locks that nobody holds: their owners were killed.
//! Where a file system knows no locks nothing is removed.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

const ALL: &str = ".unfinished";
const LOCK: &str = "lock";
/// Names that are tried: a process has as many stores open in one folder at most.
const NAMES_MAX: u32 = 1000;

/// A folder for unfinished files, removed at the end.
#[derive(Debug)]
pub(super) struct Unfinished {
    folder: PathBuf,
    lock: PathBuf,
    /// Held, not used.
    _held: File,
}

impl Unfinished {
    /// Removes what dead owners left under `root`, and claims a folder there.
    pub(super) fn claim(root: &Path) -> io::Result<Self> {
        let all = root.join(ALL);
        fs::create_dir_all(&all)?;
        sweep(&all)?;
        for number in 0..NAMES_MAX {
            let folder = all.join(format!("{}-{number}", std::process::id()));
            let lock = folder.with_extension(LOCK);
            let held = match OpenOptions::new().write(true).create_new(true).open(&lock) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            };
            // Somebody who swept between the two calls took it for a dead owner's.
            let lost = matches!(held.try_lock(), Err(fs::TryLockError::WouldBlock));
            if lost || !lock.exists() {
                continue;
            }
            fs::create_dir_all(&folder)?;
            return Ok(Self {
                folder,
                lock,
                _held: held,
            });
        }
        let message = format!(
            "{NAMES_MAX} stores of this process are open in {}",
            all.display()
        );
        Err(io::Error::new(io::ErrorKind::QuotaExceeded, message))
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        remove(&self.folder, &self.lock);
    }
}

/// The folder first: without its lock nobody would come back for it.
fn remove(folder: &Path, lock: &Path) {
    let gone = match fs::remove_dir_all(folder) {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    if gone {
        fs::remove_file(lock).ok();
    }
}

fn sweep(all: &Path) -> io::Result<()> {
    for entry in fs::read_dir(all)? {
        let lock = entry?.path();
        if lock.extension().is_none_or(|extension| extension != LOCK) {
            continue;
        }
        // Gone meanwhile: its owner ended, or somebody else sweeps.
        let Ok(file) = File::open(&lock) else {
            continue;
        };
        if file.try_lock().is_ok() {
            remove(&lock.with_extension(""), &lock);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_dead_owners_left_goes_and_what_living_ones_write_stays() {
        let root =
            std::env::temp_dir().join(format!("rootstock-unfinished-{}", std::process::id()));
        fs::remove_dir_all(&root).ok();
        let first = Unfinished::claim(&root).unwrap();
        fs::write(first.folder().join("page"), "half").unwrap();
        // A lock that nobody holds, with its folder: the mark of a process that was killed.
        let dead = root.join(ALL).join("1-0");
        fs::create_dir_all(dead.join("pages")).unwrap();
        fs::write(dead.with_extension(LOCK), "").unwrap();
        // One that was killed before it had a folder.
        let early = root.join(ALL).join("2-0.lock");
        fs::write(&early, "").unwrap();
        let second = Unfinished::claim(&root).unwrap();
        assert_ne!(first.folder(), second.folder());
        assert!(first.folder().join("page").exists(), "its owner lives");
        assert!(!dead.exists() && !dead.with_extension(LOCK).exists());
        assert!(!early.exists());
        drop((first, second));
        assert_eq!(fs::read_dir(root.join(ALL)).unwrap().count(), 0);
        fs::remove_dir_all(&root).unwrap();
    }
}
