//! The example in C, as a host would build it: against the header and the library, plainly and
//! under valgrind, and over a million calls without growing.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Builds the shared library as `cargo build` does; gives the folder it is in.
fn library() -> PathBuf {
    let exe = std::env::current_exe().expect("a test has a path");
    // TARGET/debug/deps/example-...
    let target = exe.ancestors().nth(3).expect("a target folder").to_owned();
    let built = Command::new(env!("CARGO"))
        .args([
            "build",
            "--offline",
            "-q",
            "-p",
            "rootstock-capi",
            "--target-dir",
        ])
        .arg(&target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo runs");
    assert!(built.success(), "the library does not build");
    target.join("debug")
}

/// Compiles the example into `folder`.
fn compile(folder: &Path) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = library();
    let program = folder.join("agents");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g"])
        .arg(here.join("examples/agents.c"))
        .arg("-I")
        .arg(here.join("include"))
        .arg("-L")
        .arg(&library)
        .arg("-lrootstock")
        .arg(format!("-Wl,-rpath,{}", library.display()))
        .arg("-o")
        .arg(&program)
        .output()
        .expect("cc runs");
    let said = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "cc: {said}");
    program
}

fn text(output: &Output) -> String {
    let out = String::from_utf8_lossy(&output.stdout);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{out}{err}");
    out.into_owned()
}

fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

#[test]
fn the_example_in_c_works_leaks_nothing_and_does_not_grow() {
    if !has("cc") {
        println!("skipped: no C compiler");
        return;
    }
    let folder = std::env::temp_dir().join(format!("rootstock-capi-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let program = compile(&folder);
    let said = text(&Command::new(&program).output().expect("it runs"));
    assert!(
        said.contains("agent 2: 6 tokens, 12 of 14 prompt tokens were cached"),
        "{said}"
    );
    assert!(
        said.contains("after a flood 28 of 32 tokens are cached"),
        "{said}"
    );

    // Over a million calls: 13 steps of 3 calls and more a round of the first half, 4 a round of
    // the second.
    let said = text(
        &Command::new(&program)
            .arg("20000")
            .output()
            .expect("it runs"),
    );
    let line = said.lines().last().unwrap_or_default();
    let kib: Vec<i64> = line
        .split(' ')
        .filter_map(|word| word.parse().ok())
        .collect();
    let [before, after] = kib[..] else {
        panic!("{said}")
    };
    assert!(after < before + 2048, "memory grows: {line}");

    if has("valgrind") {
        let checked = Command::new("valgrind")
            .args([
                "--quiet",
                "--error-exitcode=9",
                "--leak-check=full",
                "--show-leak-kinds=all",
            ])
            .args(["--errors-for-leak-kinds=definite,indirect,possible"])
            .arg(&program)
            .arg("20")
            .output()
            .expect("valgrind runs");
        text(&checked);
    } else {
        println!("skipped: no valgrind");
    }
    std::fs::remove_dir_all(&folder).expect("the folder goes");
}
