//! Which request computes which chunk in the next step.
#![forbid(unsafe_code)]
