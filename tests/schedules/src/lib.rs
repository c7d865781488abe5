//! Hand-overs between threads under thousands of schedules that shuttle makes up: the real sources,
//! compiled in with shuttle's locks and atomics for the standard library's, and beside each a
//! version with a planted fault, which must be found.
//!
//! `cargo test --test all`, in `tests/schedules`: the tests are in `tests/all.rs`, because the
//! sources that are compiled in here have tests of their own, for the real primitives. A schedule
//! that fails is printed, and `shuttle::replay` runs it again.

/// Wishes of tickets' holders (`plugin/engine/src/service/wish.rs`).
pub mod service {
    pub(crate) mod sync {
        pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
    }
    #[path = "../../../../plugin/engine/src/service/wish.rs"]
    pub(crate) mod wish;

    pub mod wishes;
}

/// The ring of KV events (`plugin/server/src/kv_events/ring.rs`).
pub mod kv_events {
    pub(crate) mod sync {
        pub(crate) use shuttle::sync::{Mutex, MutexGuard};
    }
    #[path = "../../../../plugin/server/src/kv_events/ring.rs"]
    pub(crate) mod ring;

    pub mod readers;
}

/// Schedules of each test.
const SCHEDULES: usize = 5_000;

/// Runs a hand-over under random schedules, and under those with few switches at odd places.
fn under_all_schedules(hand_over: fn()) {
    shuttle::check_random(hand_over, SCHEDULES);
    shuttle::check_pct(hand_over, SCHEDULES, 3);
}

/// That a planted fault does not get through.
fn is_found(hand_over: fn()) {
    let passed = std::panic::catch_unwind(|| under_all_schedules(hand_over)).is_ok();
    assert!(!passed, "the planted fault was not found");
}
