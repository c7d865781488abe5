//! Benches and recorded figures.
