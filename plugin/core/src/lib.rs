//! The embedder's crate: serving core, hints, configuration, journal.
#![forbid(unsafe_code)]

pub mod backend;
pub mod config;
pub mod hints;
pub mod journal;
pub mod serving;

pub use backend::{Backend, Caps, StepError};
pub use config::{ConfigError, CoreConfig, Limits};
pub use serving::{CoreStats, ServingCore};

pub use rootstock_memory as memory;
pub use rootstock_radix as radix;
pub use rootstock_scheduler as scheduler;
