//! Radix-tree prefix cache: which token prefix is on which pages.
#![forbid(unsafe_code)]
