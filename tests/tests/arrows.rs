//! The arrows between the crates, and what the core crates may depend on.
//!
//! Who embeds the tree compiles a handful of small crates; who embeds the core never compiles a
//! runtime, a server, a tokenizer or a model runner. A new arrow or dependency changes a table
//! here, in a commit that says why.

use std::collections::BTreeSet;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};

/// Own crates each own crate depends on, exactly.
const ARROWS: &[(&str, &[&str])] = &[
    ("rootstock-memory", &[]),
    ("rootstock-kernels", &["rootstock-memory"]),
    ("rootstock-radix", &["rootstock-memory"]),
    (
        "rootstock-scheduler",
        &["rootstock-memory", "rootstock-radix"],
    ),
    (
        "rootstock",
        &["rootstock-memory", "rootstock-radix", "rootstock-scheduler"],
    ),
    ("rootstock-engine", &["rootstock", "rootstock-kernels"]),
    ("rootstock-server", &["rootstock", "rootstock-engine"]),
    ("rootstock-capi", &["rootstock"]),
    ("rootstock-python", &["rootstock"]),
];

/// Crates that may depend on anything: nothing depends on them.
const LEAVES: &[&str] = &["rootstock-tests", "rootstock-benches"];

/// What the pure crates may use: small, no input or output, no threads.
const SMALL: &[&str] = &[
    "ahash",
    "blake3",
    "bytemuck",
    "fearless_simd",
    "half",
    "serde",
    "slab",
    "smallvec",
    "thiserror",
    "xxhash-rust",
];

/// What the embedder's crate may use beside those.
const CORE_ONLY: &[&str] = &["postcard", "serde_json", "sha2"];

/// Never below the engine, at any depth.
const NEVER_IN_CORE: &[&str] = &[
    "axum",
    "clap",
    "crossbeam-channel",
    "cudarc",
    "flume",
    "hyper",
    "memmap2",
    "minijinja",
    "opendal",
    "rand",
    "rayon",
    "reqwest",
    "tokenizers",
    "tokio",
    "tracing",
    "ureq",
];

const PURE: &[&str] = &["rootstock-memory", "rootstock-radix", "rootstock-scheduler"];

fn metadata() -> Metadata {
    MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"))
        .no_deps()
        .other_options(["--offline".to_owned()])
        .exec()
        .expect("cargo metadata reads the workspace")
}

/// Names of what a crate depends on to be built and run.
fn dependencies(package: &Package) -> BTreeSet<&str> {
    package
        .dependencies
        .iter()
        .filter(|dependency| dependency.kind != DependencyKind::Development)
        .map(|dependency| dependency.name.as_str())
        .collect()
}

fn is_own(name: &str) -> bool {
    name == "rootstock" || name.starts_with("rootstock-")
}

#[test]
fn crates_depend_on_each_other_exactly_as_drawn() {
    let metadata = metadata();
    for package in metadata.workspace_packages() {
        let name = package.name.as_str();
        let found: BTreeSet<&str> = dependencies(package)
            .into_iter()
            .filter(|name| is_own(name))
            .collect();
        assert!(
            found.iter().all(|name| !LEAVES.contains(name)),
            "{name} depends on a crate of tests or benches"
        );
        if LEAVES.contains(&name) {
            continue;
        }
        let (_, drawn) = ARROWS
            .iter()
            .find(|(drawn, _)| *drawn == name)
            .unwrap_or_else(|| panic!("{name} has no place in the drawing of arrows"));
        let drawn: BTreeSet<&str> = drawn.iter().copied().collect();
        assert_eq!(found, drawn, "arrows of {name}");
    }
}

#[test]
fn core_crates_use_only_small_crates() {
    let metadata = metadata();
    for package in metadata.workspace_packages() {
        let name = package.name.as_str();
        let allowed: Vec<&str> = if PURE.contains(&name) {
            SMALL.to_vec()
        } else if name == "rootstock" {
            [SMALL, CORE_ONLY].concat()
        } else {
            continue;
        };
        for dependency in dependencies(package) {
            let fits = is_own(dependency) || allowed.contains(&dependency);
            let optional = package
                .dependencies
                .iter()
                .any(|found| found.name == dependency && found.optional);
            assert!(fits || optional, "{name} must not depend on {dependency}");
        }
    }
}

#[test]
fn nothing_below_the_core_brings_a_runtime_a_server_or_randomness() {
    let full = MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"))
        .other_options([
            "--offline".to_owned(),
            "--filter-platform".to_owned(),
            host_triple(),
        ])
        .exec()
        .expect("cargo metadata resolves what this test was built from");
    let resolve = full.resolve.as_ref().expect("a resolved graph");
    let root = full
        .packages
        .iter()
        .find(|package| package.name.as_str() == "rootstock")
        .expect("the embedder's crate");
    let (mut seen, mut open) = (BTreeSet::new(), vec![&root.id]);
    while let Some(id) = open.pop() {
        if !seen.insert(id) {
            continue;
        }
        let node = resolve
            .nodes
            .iter()
            .find(|node| node.id == *id)
            .expect("a node per package");
        let normal = node.deps.iter().filter(|dependency| {
            dependency
                .dep_kinds
                .iter()
                .any(|kind| kind.kind == DependencyKind::Normal)
        });
        open.extend(normal.map(|dependency| &dependency.pkg));
    }
    assert!(seen.len() > 5, "the graph was walked");
    let names: BTreeSet<&str> = full
        .packages
        .iter()
        .filter(|package| seen.contains(&package.id))
        .map(|package| package.name.as_str())
        .collect();
    for never in NEVER_IN_CORE {
        assert!(
            !names.contains(never),
            "embedding rootstock would compile {never}"
        );
    }
    // Features are those of the whole workspace: a validator of the tests brings allocator-api2.
    assert!(
        names.len() <= 50,
        "{} crates to embed the core: {names:?}",
        names.len()
    );
}

fn host_triple() -> String {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = std::process::Command::new(rustc)
        .arg("-vV")
        .output()
        .expect("rustc runs");
    let text = String::from_utf8(output.stdout).expect("rustc speaks UTF-8");
    let host = text
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .expect("a host line");
    host.to_owned()
}
