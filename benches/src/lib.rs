//! Benches and recorded figures.
#![forbid(unsafe_code)]

pub mod drive;
pub mod fleet;
pub mod micro;
pub mod python_random;
pub mod trace;
pub mod workload;
