//! SHA-256 of model files, noted beside them so that a start need not read 100 MB again.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};

use super::Progress;

/// What the note beside a file says.
#[derive(Debug)]
pub(super) enum Noted {
    /// The file is as it was when it had this digest.
    Unchanged(String),
    /// Size or time of change differ, or there is no note; the digest that was noted.
    Changed(Option<String>),
}

/// Reads the note of a file.
pub(super) fn noted(path: &Path) -> io::Result<Noted> {
    let now = stamp(path)?;
    let Ok(note) = fs::read_to_string(note_path(path)) else {
        return Ok(Noted::Changed(None));
    };
    match note.trim_end().split_once(' ') {
        Some((sha256, stamp)) if is_hex(sha256) && stamp == now => {
            Ok(Noted::Unchanged(sha256.to_owned()))
        }
        Some((sha256, _)) if is_hex(sha256) => Ok(Noted::Changed(Some(sha256.to_owned()))),
        _ => Ok(Noted::Changed(None)),
    }
}

/// Writes the note of a file.
pub(super) fn note(path: &Path, sha256: &str) -> io::Result<()> {
    let text = format!("{sha256} {}\n", stamp(path)?);
    let note = note_path(path);
    if fs::read_to_string(&note).is_ok_and(|there| there == text) {
        return Ok(());
    }
    fs::write(note, text)
}

/// The digest of a file in lower-case hex.
pub(super) fn file(path: &Path, progress: &mut dyn FnMut(Progress)) -> io::Result<String> {
    let mut file = File::open(path)?;
    let total = file.metadata()?.len();
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(buffer.get(..count).unwrap_or_default());
        bytes += count as u64;
        progress(Progress::Verifying { bytes, total });
    }
}

/// Bytes as lower-case hex.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_hex(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Size and time of change.
fn stamp(path: &Path) -> io::Result<String> {
    let meta = fs::metadata(path)?;
    let changed = meta
        .modified()?
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Ok(format!(
        "{} {}.{:09}",
        meta.len(),
        changed.as_secs(),
        changed.subsec_nanos()
    ))
}

fn note_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".sha256");
    path.with_file_name(name)
}
