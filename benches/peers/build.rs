//! Finds the released source of `aisimulate-core`, whose tree is private to it, and mounts the
//! files of that tree as modules of ours. Nothing is copied: the paths lead into cargo's registry.

use std::error::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGE: &str = "aisimulate-core";

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?);
    println!("cargo::rerun-if-changed=Cargo.lock");
    let source = source_of(&folder)?.join("src/engine");
    let mut modules = String::new();
    mount(&mut modules, "belady", &source.join("belady.rs"))?;
    writeln!(modules, "pub(crate) mod common {{")?;
    mount(&mut modules, "hashing", &source.join("common/hashing.rs"))?;
    writeln!(modules, "}}\npub(crate) mod cache {{")?;
    mount(
        &mut modules,
        "radix_cache",
        &source.join("cache/radix_cache.rs"),
    )?;
    writeln!(modules, "}}")?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("engine.rs"), modules)?;
    Ok(())
}

fn mount(modules: &mut String, name: &str, file: &Path) -> Result<(), Box<dyn Error>> {
    if !file.exists() {
        return Err(format!("{} is not in the package", file.display()).into());
    }
    writeln!(modules, "#[path = {file:?}]\npub(crate) mod {name};")?;
    Ok(())
}

/// The folder of the package as the lock file names it; downloaded where it is not there.
fn source_of(folder: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let cargo = std::env::var("CARGO")?;
    let mut command = Command::new(cargo);
    command.args(["metadata", "--format-version", "1", "--locked"]);
    let output = command.current_dir(folder).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().ok_or("no packages")?;
    let found = packages.iter().find(|package| package["name"] == PACKAGE);
    let manifest = found.and_then(|package| package["manifest_path"].as_str());
    let manifest = Path::new(manifest.ok_or("the package is not in the lock file")?);
    Ok(manifest.parent().ok_or("no folder")?.to_owned())
}
