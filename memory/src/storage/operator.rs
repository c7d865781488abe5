//! From the address of a store to the OpenDAL operator that works on it.

use super::StorageError;
use opendal::Operator;
use opendal::services::Fs;

/// Schemes of this build.
const KNOWN: &str = if cfg!(all(feature = "storage-redis", feature = "storage-s3")) {
    "fs:///folder, redis://host:port and s3://bucket"
} else if cfg!(feature = "storage-redis") {
    "fs:///folder and redis://host:port"
} else if cfg!(feature = "storage-s3") {
    "fs:///folder and s3://bucket"
} else {
    "fs:///folder"
};

/// Where files lie until they are whole.
const UNFINISHED: &str = ".unfinished";

pub(super) fn open(uri: &str) -> Result<Operator, StorageError> {
    let refused = |reason: String| StorageError::Open {
        uri: uri.to_owned(),
        reason,
    };
    if let Some(folder) = uri
        .strip_prefix("fs://")
        .filter(|path| path.starts_with('/'))
    {
        let unfinished = format!("{}/{UNFINISHED}", folder.trim_end_matches('/'));
        // What a process that was killed left half written.
        if let Err(error) = std::fs::remove_dir_all(&unfinished)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(refused(error.to_string()));
        }
        let builder = Fs::default().root(folder).atomic_write_dir(&unfinished);
        return Operator::new(builder).map_err(|error| refused(error.to_string()));
    }
    let remote = (cfg!(feature = "storage-redis") && uri.starts_with("redis"))
        || (cfg!(feature = "storage-s3") && uri.starts_with("s3://"));
    if remote {
        return Operator::from_uri(uri).map_err(|error| refused(error.to_string()));
    }
    Err(StorageError::Scheme {
        uri: uri.to_owned(),
        known: KNOWN,
    })
}
