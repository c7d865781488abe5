//! Pages, tiers and copy plans: plain bookkeeping of the KV pool.
#![forbid(unsafe_code)]
