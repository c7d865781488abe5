//! Buffers that kernel calls reuse, so that a warm step allocates nothing.

/// Working memory of one caller; grows to the largest step seen and never shrinks.
#[derive(Debug, Default)]
pub struct Scratch {}
