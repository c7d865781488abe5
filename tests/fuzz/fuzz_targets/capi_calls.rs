//! Programs of C calls (`plugin/capi/tests/shared/program.rs`), under AddressSanitizer.
//!
//! `cargo +nightly fuzz run capi_calls -- -max_total_time=60`, in `tests/`.
#![no_main]

#[path = "../../../plugin/capi/src/action.rs"]
mod action;
#[path = "../../../plugin/capi/src/args.rs"]
mod args;
#[path = "../../../plugin/capi/src/cache.rs"]
mod cache;
#[path = "../../../plugin/capi/src/core.rs"]
mod core;
#[path = "../../../plugin/capi/src/emit.rs"]
mod emit;
#[path = "../../../plugin/capi/src/handle.rs"]
mod handle;
#[path = "../../../plugin/capi/src/pages.rs"]
mod pages;
#[path = "../../../plugin/capi/src/plan.rs"]
mod plan;
#[path = "../../../plugin/capi/tests/shared/program.rs"]
mod program;
#[path = "../../../plugin/capi/src/request.rs"]
mod request;
#[path = "../../../plugin/capi/src/settings.rs"]
mod settings;
#[path = "../../../plugin/capi/src/status.rs"]
mod status;

use libfuzzer_sys::fuzz_target;

/// Longest program; longer ones find nothing more and are slow to shrink.
const BYTES: usize = 1200;

fuzz_target!(|bytes: &[u8]| {
    program::run(&bytes[..bytes.len().min(BYTES)]);
});
