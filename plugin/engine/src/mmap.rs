//! Read-only bytes of a model file: a memory map, or a vector for files that are made in memory.
//!
//! The only unsafe code of this crate. A map is sound as long as nobody shortens or rewrites the
//! file while it is mapped: models in our cache are put in place by an atomic rename and never
//! written again, and for a file that the user names the same duty is stated in the documentation
//! of `Gguf::open`.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

/// Bytes that do not change for as long as the value lives.
#[derive(Debug)]
pub(crate) enum FileBytes {
    /// Pages of a file, loaded on first use.
    Mapped(Mmap),
    /// Bytes in memory.
    Owned(Vec<u8>),
}

impl FileBytes {
    /// Maps a whole file.
    ///
    /// The file must not be shortened or rewritten in place while the value lives: readers would
    /// see changed weights, or the process would be stopped by SIGBUS. Replacing the file by a
    /// rename is safe.
    ///
    /// # Errors
    /// What the operating system reports; an empty file gives empty bytes.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file",
            ));
        }
        if meta.len() == 0 {
            return Ok(Self::Owned(Vec::new()));
        }
        // SAFETY: `Mmap::map` asks that the file is not changed while it is mapped. Files of our
        // cache are immutable after their rename; for others the caller has the duty stated above.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self::Mapped(map))
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}
