//! API keys: who may ask, in whose name, and how important they may be.
//!
//! Without keys everybody may ask and any key is taken. With a key file, or keys in the
//! environment, a request needs one of them, as `Authorization: Bearer` or `x-api-key`. What a
//! tenant caches is its own: the tenant's name is part of the salt, framed by its length, so that
//! no choice of name and salt is that of another tenant. Keys are kept as digests and never
//! written anywhere.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::http::{HeaderMap, header};
use rootstock::hints::{Ceiling, ParsedHints};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::http::api_error::{ApiError, ErrorKind};
use crate::http::rate::Rate;

const KEYS_MAX: usize = 10_000;
const KEY_BYTES_MIN: usize = 8;

/// The environment variable with keys, separated by commas, of the tenant [`ENVIRONMENT_TENANT`].
pub const ENVIRONMENT: &str = "ROOTSTOCK_API_KEY";
/// Whom the keys of the environment belong to.
pub const ENVIRONMENT_TENANT: &str = "environment";

/// All keys that are taken.
#[derive(Clone, PartialEq)]
pub struct Keys {
    tenants: BTreeMap<[u8; 32], Tenant>,
}

/// Whom a key belongs to.
#[derive(Clone, Debug, PartialEq)]
pub struct Tenant {
    name: String,
    ceiling: Ceiling,
    rate: Option<Arc<Rate>>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys")
            .field("count", &self.tenants.len())
            .finish()
    }
}

/// A key file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeysError {
    /// It cannot be read.
    #[error("cannot read the API keys {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not what it should be. The text of the file is not repeated.
    #[error("the API keys {}: {message}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The keys of the environment are not what they should be. They are not repeated.
    #[error("{ENVIRONMENT}: {message}")]
    Environment {
        /// What is wrong.
        message: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    key: Vec<Row>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Row {
    key: String,
    tenant: String,
    max_priority: Option<i32>,
    max_strict_priority: Option<u32>,
    max_jump_s: Option<f64>,
    max_pins: Option<u32>,
    max_pin_s: Option<u64>,
    max_requests_per_minute: Option<u32>,
}

impl Keys {
    /// The keys of a file and of the environment together; None when there are neither.
    ///
    /// # Errors
    /// When the file cannot be read, or a key is wrong or stands in both.
    pub fn gather(
        file: Option<&Path>,
        environment: Option<&str>,
    ) -> Result<Option<Keys>, KeysError> {
        let mut keys = file.map(Keys::read).transpose()?;
        if let Some(listed) = environment {
            keys.get_or_insert_with(|| Keys {
                tenants: BTreeMap::new(),
            })
            .add_listed(listed)
            .map_err(|message| KeysError::Environment { message })?;
        }
        Ok(keys)
    }

    fn add_listed(&mut self, listed: &str) -> Result<(), String> {
        for (index, key) in listed.split(',').map(str::trim).enumerate() {
            let number = index + 1;
            check_key(number, key)?;
            let tenant = Tenant {
                name: ENVIRONMENT_TENANT.to_owned(),
                rate: None,
                ceiling: Ceiling::default(),
            };
            if self.tenants.insert(digest(key), tenant).is_some() {
                return Err(format!(
                    "key {number} stands there twice, or in the key file"
                ));
            }
        }
        Ok(())
    }

    /// Reads a key file.
    ///
    /// # Errors
    /// When it cannot be read, or a row is wrong (told by its number).
    pub fn read(path: &Path) -> Result<Keys, KeysError> {
        let text = std::fs::read_to_string(path).map_err(|source| KeysError::Read {
            path: path.to_owned(),
            source,
        })?;
        Keys::parse(&text).map_err(|message| KeysError::Content {
            path: path.to_owned(),
            message,
        })
    }

    fn parse(text: &str) -> Result<Keys, String> {
        // The parser's own message would show a line of the file.
        let file: File = toml::from_str(text).map_err(|error| {
            let line = error
                .span()
                .and_then(|span| text.get(..span.start))
                .map_or(1, |before| before.matches('\n').count() + 1);
            format!(
                "line {line} is wrong; rows are [[key]] with key, tenant and optionally \
                 max-priority, max-strict-priority, max-jump-s, max-pins, max-pin-s, \
                 max-requests-per-minute"
            )
        })?;
        if file.key.is_empty() || file.key.len() > KEYS_MAX {
            return Err(format!(
                "it has {} keys, 1 to {KEYS_MAX} are possible",
                file.key.len()
            ));
        }
        let mut tenants = BTreeMap::new();
        for (index, row) in file.key.into_iter().enumerate() {
            let number = index + 1;
            check_key(number, &row.key)?;
            if row.tenant.is_empty() {
                return Err(format!("key {number} has no tenant"));
            }
            if row.max_requests_per_minute == Some(0) {
                return Err(format!(
                    "key {number} may begin no request; leave the key out"
                ));
            }
            let free = Ceiling::default();
            let rate = row
                .max_requests_per_minute
                .map(|most| Arc::new(Rate::new(most)));
            let tenant = Tenant {
                name: row.tenant,
                rate,
                ceiling: Ceiling {
                    priority: row.max_priority.unwrap_or(free.priority),
                    strict: row.max_strict_priority.unwrap_or(free.strict),
                    jump_s: row.max_jump_s.unwrap_or(free.jump_s),
                    pins: row.max_pins.unwrap_or(free.pins),
                    pin_s: row.max_pin_s.unwrap_or(free.pin_s),
                },
            };
            if tenants.insert(digest(&row.key), tenant).is_some() {
                return Err(format!("key {number} stands there twice"));
            }
        }
        Ok(Keys { tenants })
    }

    /// The tenant whose key came with a request.
    ///
    /// # Errors
    /// `Unauthorized` when there is no key, or none of ours.
    pub fn tenant(&self, headers: &HeaderMap) -> Result<&Tenant, ApiError> {
        let key = key_of(headers).ok_or_else(|| {
            let message = "an API key is needed, as Authorization: Bearer or as x-api-key";
            ApiError::new(ErrorKind::Unauthorized, message)
        })?;
        self.tenants
            .get(&digest(key))
            .ok_or_else(|| ApiError::new(ErrorKind::Unauthorized, "the API key is not valid"))
    }
}

impl Tenant {
    /// Counts a request that begins.
    ///
    /// # Errors
    /// `Overloaded` with the seconds to wait, when it is one too many.
    pub fn begin(&self) -> Result<(), ApiError> {
        let Some(rate) = &self.rate else {
            return Ok(());
        };
        rate.take(crate::clock::now()).map_err(|wait_s| {
            let most = rate.per_minute();
            let message =
                format!("this key may begin {most} requests a minute; ask again in {wait_s} s");
            ApiError::new(ErrorKind::Overloaded, message).retry_after(wait_s)
        })
    }

    /// Puts a request's hints into the tenant's bounds and namespace.
    pub fn bind(&self, parsed: &mut ParsedHints) {
        parsed.restrict(&self.ceiling);
        let own = parsed.salt.take().unwrap_or_default();
        parsed.bind_salt(&format!("tenant {}:{}/{own}", self.name.len(), self.name));
    }
}

fn check_key(number: usize, key: &str) -> Result<(), String> {
    if key.len() < KEY_BYTES_MIN || key.contains(char::is_whitespace) {
        return Err(format!(
            "key {number} must have at least {KEY_BYTES_MIN} bytes and no spaces"
        ));
    }
    Ok(())
}

fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

fn key_of(headers: &HeaderMap) -> Option<&str> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    let own = || {
        headers
            .get("x-api-key")
            .and_then(|value| value.to_str().ok())
    };
    bearer.or_else(own).filter(|key| !key.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "[[key]]\nkey = \"sk-first-key\"\ntenant = \"a\"\nmax-priority = 5\n\
        [[key]]\nkey = \"sk-second-key\"\ntenant = \"a/x\"\n";

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        headers
    }

    fn bound(key: &str, salt: Option<&str>, priority: i32) -> ParsedHints {
        let keys = Keys::parse(FILE).unwrap();
        let mut parsed = ParsedHints {
            salt: salt.map(str::to_owned),
            ..ParsedHints::default()
        };
        parsed.hints.priority = priority;
        keys.tenant(&headers("x-api-key", key))
            .unwrap()
            .bind(&mut parsed);
        parsed
    }

    #[test]
    fn both_headers_carry_keys_and_others_are_refused() {
        let keys = Keys::parse(FILE).unwrap();
        assert!(
            keys.tenant(&headers("authorization", "Bearer sk-first-key"))
                .is_ok()
        );
        assert!(keys.tenant(&headers("x-api-key", "sk-second-key")).is_ok());
        for wrong in [
            headers("authorization", "Basic sk-first-key"),
            headers("authorization", "Bearer nobody"),
            HeaderMap::new(),
        ] {
            let error = keys.tenant(&wrong).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Unauthorized);
            assert!(!error.message.contains("nobody"), "keys are not repeated");
        }
    }

    #[test]
    fn a_tenant_cannot_name_its_way_into_another() {
        let salts = [
            bound("sk-first-key", None, 0).salt,
            bound("sk-first-key", Some("x/"), 0).salt,
            bound("sk-second-key", None, 0).salt,
            bound("sk-second-key", Some("tenant 1:a/"), 0).salt,
        ];
        for (index, salt) in salts.iter().enumerate() {
            assert!(
                salts.iter().skip(index + 1).all(|other| other != salt),
                "{salt:?}"
            );
        }
        assert_eq!(bound("sk-first-key", None, 900).hints.priority, 5);
        assert_eq!(bound("sk-second-key", None, 900).hints.priority, 900);
    }

    #[test]
    fn a_wrong_file_is_told_without_repeating_it() {
        for text in [
            "",
            "key = 5",
            "[[key]]\nkey = \"short\"\ntenant = \"a\"",
            "[[key]]\nkey = \"sk-long-enough\"\ntenant = \"\"",
            "[[key]]\nkey = \"sk-long-enough\"\ntenant = \"a\"\nsecret-typo = 1",
        ] {
            let message = Keys::parse(text).unwrap_err();
            assert!(
                !message.contains("sk-") && !message.contains("typo"),
                "{message}"
            );
        }
        let shown = format!("{:?}", Keys::parse(FILE).unwrap());
        assert!(!shown.contains("sk-"), "{shown}");
    }

    #[test]
    fn keys_of_the_environment_are_taken_beside_those_of_a_file() {
        assert!(Keys::gather(None, None).unwrap().is_none());
        let keys = Keys::gather(None, Some("sk-of-mine, sk-of-yours")).unwrap();
        let keys = keys.unwrap();
        for key in ["sk-of-mine", "sk-of-yours"] {
            let tenant = keys.tenant(&headers("x-api-key", key)).unwrap();
            assert_eq!(tenant.name, ENVIRONMENT_TENANT);
        }
        assert!(keys.tenant(&headers("x-api-key", "sk-of-mine,")).is_err());
        let mut both = Keys::parse(FILE).unwrap();
        both.add_listed("sk-of-mine").unwrap();
        assert!(both.tenant(&headers("x-api-key", "sk-first-key")).is_ok());
        assert!(both.tenant(&headers("x-api-key", "sk-of-mine")).is_ok());
        for wrong in [
            "",
            "sk-of-mine,",
            "sk-short,x",
            "sk-first-key",
            "sk of mine",
        ] {
            let message = Keys::parse(FILE).unwrap().add_listed(wrong).unwrap_err();
            assert!(!message.contains("sk-"), "{message}");
        }
    }
}
