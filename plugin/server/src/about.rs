//! What this build is: version, commit, target and features.

use std::sync::LazyLock;

/// The version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit it was built from, where whoever built it said so in `ROOTSTOCK_BUILD_COMMIT`.
pub const COMMIT: Option<&str> = option_env!("ROOTSTOCK_BUILD_COMMIT");

static LONG: LazyLock<String> = LazyLock::new(|| {
    let commit = COMMIT.unwrap_or("not told");
    let features = features().join(", ");
    let profile = if cfg!(debug_assertions) {
        "with debug assertions"
    } else {
        "release"
    };
    format!(
        "{VERSION}\ncommit:   {commit}\ntarget:   {}-{}\nprofile:  {profile}\nfeatures: {features}",
        std::env::consts::ARCH,
        std::env::consts::OS,
    )
});

/// All of it, for `--version`.
pub fn long() -> &'static str {
    &LONG
}

/// Features that this build has.
pub fn features() -> Vec<&'static str> {
    let all = [
        ("cuda", cfg!(feature = "cuda")),
        ("hub", cfg!(feature = "hub")),
        ("otel", cfg!(feature = "otel")),
        ("storage", cfg!(feature = "storage")),
        ("storage-redis", cfg!(feature = "storage-redis")),
        ("storage-s3", cfg!(feature = "storage-s3")),
        ("top", cfg!(feature = "top")),
    ];
    all.into_iter()
        .filter_map(|(name, is_in)| is_in.then_some(name))
        .collect()
}
