//! From the address of a store to the OpenDAL operator that works on it.

use super::StorageError;
use super::unfinished::Unfinished;
use crate::store::without_secrets;
use opendal::services::Fs;
use opendal::{Operator, OperatorUri};
use std::path::Path;

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

/// What works on a store, and for a folder where its unfinished files lie.
pub(super) type Opened = (Operator, Option<Unfinished>);

pub(super) fn open(uri: &str) -> Result<Opened, StorageError> {
    let refused = |reason: String| StorageError::Open {
        uri: without_secrets(uri),
        reason,
    };
    if let Some(folder) = uri
        .strip_prefix("fs://")
        .filter(|path| path.starts_with('/'))
    {
        let unfinished =
            Unfinished::claim(Path::new(folder)).map_err(|error| refused(error.to_string()))?;
        let place = unfinished.folder().to_str();
        let place = place.ok_or_else(|| refused("the path must be UTF-8".to_owned()))?;
        let builder = Fs::default().root(folder).atomic_write_dir(place);
        let store = Operator::new(builder).map_err(|error| refused(error.to_string()))?;
        return Ok((store, Some(unfinished)));
    }
    let remote = (cfg!(feature = "storage-redis") && uri.starts_with("redis://"))
        || (cfg!(feature = "storage-s3") && uri.starts_with("s3://"));
    if remote {
        let store = open_remote(uri).map_err(|error| refused(error.to_string()))?;
        return Ok((store, None));
    }
    Err(StorageError::Scheme {
        uri: without_secrets(uri),
        known: KNOWN,
    })
}

/// A part of an address without its `%` escapes.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let escaped = (first == b'%').then(|| after.first_chunk::<2>()).flatten();
        let digits = escaped.and_then(|pair| str::from_utf8(pair).ok());
        let byte = digits.and_then(|pair| u8::from_str_radix(pair, 16).ok());
        bytes.push(byte.unwrap_or(first));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The name and password of the address count, as clients of these stores have it.
fn open_remote(uri: &str) -> opendal::Result<Operator> {
    opendal::install_default();
    let read = OperatorUri::new(uri, [])?;
    let own = [("username", read.username()), ("password", read.password())];
    let own = own.map(|(name, value)| Some((name.to_owned(), decoded(value?))));
    Operator::from_uri(OperatorUri::new(uri, own.into_iter().flatten())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_of_a_password_are_undone_and_nothing_else() {
        let cases = [
            ("pa%20ss", "pa ss"),
            ("%2", "%2"),
            ("a%zzb", "a%zzb"),
            ("%C3%A4", "\u{e4}"),
        ];
        for (text, plain) in cases {
            assert_eq!(decoded(text), plain);
        }
    }
}
