//! The server through its public edge: HTTP over real sockets, one process for all of it.
//!
//! Backends: a parrot that repeats its prompt and fails on command, a small random Llama made
//! here, and the default model where it can be had.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests stop at the first surprise and say what they skipped"
)]

mod ahead;
mod anthropic;
mod bodies;
mod broken;
mod checks;
mod client;
mod control;
mod curve;
mod default_model;
mod document;
mod drain;
mod edge;
mod equal;
mod limits;
mod look;
mod metrics;
mod model;
mod openai;
mod parrot;
mod programs;
mod replicas;
mod responses;
mod script;
mod server;
mod stripped;
mod tiers;
mod tiny_model;
mod tools;
mod why;
