//! The C ABI: the prefix cache alone, or cache and scheduler, for engines in any language.
//!
//! `include/rootstock.h` is generated from here and is what hosts read. Structures that a host
//! fills begin with `struct_size`, so that a later version can append fields; configurations are
//! JSON with the field names of `CacheConfig` and `CoreConfig`, and an unknown name is refused.
//!
//! Nothing of a host's memory is kept after a call returns, and no call calls back.

#![expect(unreachable_pub, reason = "what is exported goes to C, not to Rust")]

mod action;
mod args;
mod cache;
mod core;
mod emit;
mod handle;
mod pages;
mod plan;
mod request;
mod settings;
mod status;

use std::ffi::c_char;

/// Version of the ABI: a host built for the same number works with this library.
pub const ROOTSTOCK_ABI_VERSION: u32 = 1;

/// The version of the ABI that this library has; compare it with `ROOTSTOCK_ABI_VERSION`.
#[unsafe(no_mangle)]
pub extern "C" fn rootstock_abi_version() -> u32 {
    ROOTSTOCK_ABI_VERSION
}

/// The version of Rootstock, as text that ends with 0 and is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn rootstock_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
