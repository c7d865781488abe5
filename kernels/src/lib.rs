//! Arithmetic over KV arenas: SIMD with run-time dispatch beside a scalar reference.
