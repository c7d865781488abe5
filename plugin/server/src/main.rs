//! The server and tools binary.
#![forbid(unsafe_code)]

fn main() {}
