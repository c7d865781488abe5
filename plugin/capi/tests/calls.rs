//! Random programs of C calls, some dozens in each run; `tests/fuzz` has the same under
//! libFuzzer. The library's modules are compiled in: it is a C library, and no Rust one.
#![expect(unreachable_pub, reason = "the library's own modules")]

#[path = "../src/action.rs"]
mod action;
#[path = "../src/args.rs"]
mod args;
#[path = "../src/cache.rs"]
mod cache;
#[path = "../src/core.rs"]
mod core;
#[path = "../src/emit.rs"]
mod emit;
#[path = "../src/handle.rs"]
mod handle;
#[path = "../src/pages.rs"]
mod pages;
#[path = "../src/plan.rs"]
mod plan;
#[path = "shared/program.rs"]
mod program;
#[path = "../src/request.rs"]
mod request;
#[path = "../src/settings.rs"]
mod settings;
#[path = "../src/status.rs"]
mod status;

use status::RootstockStatus as Status;

/// The next number of a sequence that looks random.
fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[test]
fn no_program_of_calls_panics_or_breaks_a_count() {
    for seed in 0..40 {
        let mut state = seed;
        let bytes: Vec<u8> = (0..150)
            .flat_map(|_| mix(&mut state).to_le_bytes())
            .collect();
        program::run(&bytes);
    }
}

/// Calls a function of the library.
macro_rules! call {
    ($function:path $(, $argument:expr)* $(,)?) => {{
        // SAFETY: the handle is live, and every pointer is to as much as its length says.
        unsafe { $function($($argument),*) }
    }};
}

/// What `struct_size` has to be.
fn size<T>() -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX)
}

/// A cache of two replicas, and a namespace in it.
fn two_replicas() -> (*mut handle::Handle<cache::Cache>, u64) {
    let config = r#"{"page_tokens": 2, "device_pages": [4, 4], "policy": "lru"}"#;
    let (mut it, mut namespace_id) = (std::ptr::null_mut(), 0);
    let text = config.as_ptr().cast();
    let made = call!(cache::rootstock_cache_new, text, config.len(), &raw mut it);
    assert_eq!(made, Status::Ok);
    let none = std::ptr::null();
    let namespace = cache::RootstockNamespace {
        struct_size: size::<cache::RootstockNamespace>(),
        model: none,
        model_length: 0,
        numerics: none,
        numerics_length: 0,
        lora: none,
        lora_length: 0,
        salt: none,
        salt_length: 0,
    };
    let namespace = (&raw const namespace, &raw mut namespace_id);
    let named = call!(
        cache::rootstock_cache_namespace,
        it,
        namespace.0,
        namespace.1
    );
    assert_eq!(named, Status::Ok);
    (it, namespace_id)
}

/// Found by reading, while the programs were written: it panicked, and the cache was lost.
#[test]
fn an_allocation_on_another_replica_than_the_lease_is_refused_and_stays() {
    let (it, namespace_id) = two_replicas();
    let tokens = [1_u32, 2];
    let prompt = cache::RootstockPrompt {
        struct_size: size::<cache::RootstockPrompt>(),
        replica: 0,
        namespace_id,
        tokens: tokens.as_ptr(),
        length: 2,
        max_tokens: 1,
    };
    let (mut lease, mut found) = (0, cache::RootstockFound::default());
    let (from, to) = (&raw const prompt, &raw mut lease);
    let matched = call!(
        cache::rootstock_cache_match,
        it,
        from,
        1,
        to,
        &raw mut found
    );
    assert_eq!(matched, Status::Ok);
    let extend = |replica: u32| {
        let (mut page, mut allocation) = ([0_u32], 0);
        let (to, id) = (page.as_mut_ptr(), &raw mut allocation);
        let got = call!(pages::rootstock_cache_allocate, it, replica, 1, 1, to, id);
        assert_eq!(got, Status::Ok);
        let span = pages::RootstockSpan {
            struct_size: size::<pages::RootstockSpan>(),
            lease,
            allocation,
            priority: 0,
            retention_s: 0,
            keep_duplicates: 0,
            tokens: tokens.as_ptr(),
            length: 2,
            busy_until: 0,
        };
        let mut entry = pages::RootstockSwap { index: 0, page: 0 };
        let mut swaps = pages::RootstockSwaps {
            entries: &raw mut entry,
            capacity: 1,
            count: 0,
        };
        let (from, to) = (&raw const span, &raw mut swaps);
        let extended = call!(pages::rootstock_cache_extend, it, from, 1, to);
        let kept = call!(pages::rootstock_cache_release, it, allocation, 0);
        (extended, kept)
    };
    assert_eq!(extend(1), (Status::Invalid, Status::Ok));
    assert_eq!(extend(0), (Status::Ok, Status::Unknown));
    assert_eq!(call!(cache::rootstock_cache_check, it), Status::Ok);
    call!(cache::rootstock_cache_free, it);
}

/// The page is cached already, so the host's is released: it has to hear which to use instead.
#[test]
fn without_a_place_for_swaps_an_extension_changes_nothing() {
    let (it, namespace_id) = two_replicas();
    let tokens = [1_u32, 2];
    let prompt = cache::RootstockPrompt {
        struct_size: size::<cache::RootstockPrompt>(),
        replica: 0,
        namespace_id,
        tokens: tokens.as_ptr(),
        length: 2,
        max_tokens: 1,
    };
    let mut entry = pages::RootstockSwap { index: 9, page: 0 };
    let places = [&raw mut entry, std::ptr::null_mut(), &raw mut entry];
    let wanted = [Status::Ok, Status::Invalid, Status::Ok];
    for (entries, wanted) in places.into_iter().zip(wanted) {
        let (mut lease, mut found) = (0, cache::RootstockFound::default());
        let (from, to) = (&raw const prompt, &raw mut lease);
        let found = &raw mut found;
        let matched = call!(cache::rootstock_cache_match, it, from, 1, to, found);
        assert_eq!(matched, Status::Ok);
        let (mut page, mut allocation) = ([0_u32], 0);
        let (to, id) = (page.as_mut_ptr(), &raw mut allocation);
        let got = call!(pages::rootstock_cache_allocate, it, 0, 1, 1, to, id);
        assert_eq!(got, Status::Ok);
        let span = pages::RootstockSpan {
            struct_size: size::<pages::RootstockSpan>(),
            lease,
            allocation,
            priority: 0,
            retention_s: 0,
            keep_duplicates: 0,
            tokens: tokens.as_ptr(),
            length: 2,
            busy_until: 0,
        };
        let mut swaps = pages::RootstockSwaps {
            entries,
            capacity: 1,
            count: 0,
        };
        let (from, to) = (&raw const span, &raw mut swaps);
        let extended = call!(pages::rootstock_cache_extend, it, from, 1, to);
        assert_eq!(extended, wanted);
        let kept = call!(pages::rootstock_cache_release, it, allocation, 0);
        assert_eq!(kept == Status::Ok, wanted == Status::Invalid);
    }
    assert_eq!(entry.index, 0, "the third was told of its swap");
    assert_eq!(call!(cache::rootstock_cache_check, it), Status::Ok);
    call!(cache::rootstock_cache_free, it);
}
