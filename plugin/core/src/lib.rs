//! The embedder's crate: serving core, hints, configuration, journal.
#![forbid(unsafe_code)]
