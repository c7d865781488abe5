//! Builds the mock driver over the emulated kernels with g++, and runs tests in a child process
//! that finds it as libcuda and libnvrtc.
//!
//! The library is built once for a content of its sources and kept in the target folder. Most
//! variants are built with AddressSanitizer and UndefinedBehaviorSanitizer, which the child needs
//! before anything else is loaded. Without g++ a test prints that it was skipped.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "shared by test binaries"
)]

use std::ffi::{CStr, c_char};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

/// In the child: which test it runs.
const CHILD: &str = "ROOTSTOCK_TEST_ON_MOCK";

/// A change of one source: what is replaced, and by what.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// What is wrong.
    pub name: &'static str,
    /// File below `kernels/cuda`.
    pub file: &'static str,
    /// Text that is there exactly once.
    pub from: &'static str,
    /// What stands there instead.
    pub to: &'static str,
}

/// What a library holds.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// Head widths of the attention modules.
    pub head_dims: &'static [u32],
    /// Numbers of element types.
    pub kv_types: &'static [u32],
    /// With sanitizers, or optimized.
    pub sanitized: bool,
    /// Something planted.
    pub fault: Option<Fault>,
}

/// Runs `body` in a child with the mock driver. True in the child, when the body is to run.
///
/// # Panics
/// In the parent, when the child failed.
pub fn on_mock(test: &str, variant: &Variant) -> bool {
    if std::env::var_os(CHILD).is_some_and(|name| name == test) {
        return true;
    }
    if let Some(output) = run_child(test, test, variant, &[]) {
        let text = text(&output);
        for line in text.lines().filter(|line| line.starts_with("    ")) {
            println!("{line}");
        }
        assert!(
            output.status.success(),
            "{test} on the mock driver:\n{text}"
        );
    }
    false
}

/// Runs `body_of`, a test of this binary, over a library with a fault; true when it failed, None
/// without g++.
pub fn fails_with(body_of: &str, variant: &Variant, environment: &[(&str, &str)]) -> Option<bool> {
    let output = run_child(body_of, body_of, variant, environment)?;
    let text = text(&output);
    assert!(
        text.contains("running 1 test"),
        "the child ran nothing:\n{text}"
    );
    Some(!output.status.success())
}

fn text(output: &Output) -> String {
    let out = String::from_utf8_lossy(&output.stdout);
    format!("{out}{}", String::from_utf8_lossy(&output.stderr))
}

fn run_child(
    filter: &str,
    child: &str,
    variant: &Variant,
    environment: &[(&str, &str)],
) -> Option<Output> {
    let Some(folder) = build(variant) else {
        println!("skipped: no g++ to build the emulated kernels with");
        return None;
    };
    let exe = std::env::current_exe().unwrap();
    let mut command = Command::new(exe);
    command
        .args(["--exact", filter, "--nocapture", "--test-threads=1"])
        .env(CHILD, child)
        .env("LD_LIBRARY_PATH", &folder)
        .envs(environment.iter().copied());
    if variant.sanitized {
        let file = Command::new("g++")
            .arg("-print-file-name=libasan.so")
            .output()
            .unwrap();
        let file = String::from_utf8_lossy(&file.stdout).trim().to_owned();
        command
            .env("LD_PRELOAD", file)
            .env("ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0");
    }
    Some(command.output().unwrap())
}

fn repository() -> PathBuf {
    let mut folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    while !folder.join("kernels/cuda/prelude.cu").exists() {
        assert!(folder.pop(), "the sources are above this crate");
    }
    folder
}

/// The kernel sources, with the fault.
fn kernel_source(name: &str, fault: Option<Fault>) -> String {
    let path = repository().join("kernels/cuda").join(name);
    let source = std::fs::read_to_string(path).unwrap();
    match fault {
        Some(fault) if fault.file == name => {
            let found = source.matches(fault.from).count();
            assert_eq!(found, 1, "{}: the text to change is there once", fault.name);
            source.replace(fault.from, fault.to)
        }
        _ => source,
    }
}

/// The translation units: one with the general kernels, one for each element type.
fn units(variant: &Variant) -> Vec<String> {
    let source = |name| kernel_source(name, variant.fault);
    let prelude = source("prelude.cu");
    let mut general = String::from("#include \"emulation.h\"\n#define MODULE \"\"\nnamespace {\n");
    general.push_str(&prelude);
    for name in ["general.cu", "dequantize.cu", "sample.cu"] {
        general.push_str(&source(name));
    }
    general.push_str("}\n");
    let attention = source("attention.cu");
    let mut units = vec![general];
    for kv_type in variant.kv_types {
        let mut unit = String::from("#include \"emulation.h\"\n");
        for dim in variant.head_dims {
            let options = format!("-DHEAD_DIM={dim} -DKV_TYPE={kv_type}");
            write!(
                unit,
                "#undef ROOTSTOCK_PRELUDE\n#undef MODULE\n#undef HEAD_DIM\n#undef KV_TYPE\n\
                 #define MODULE \"{options}\"\n#define HEAD_DIM {dim}\n\
                 #define KV_TYPE {kv_type}\nnamespace dim_{dim} {{ namespace {{\n\
                 {prelude}{attention}}} }}\n"
            )
            .unwrap();
        }
        units.push(unit);
    }
    units
}

/// The folder with the built library; None without g++.
pub fn build(variant: &Variant) -> Option<PathBuf> {
    Command::new("g++").arg("--version").output().ok()?;
    let tests = repository().join("kernels/tests/cuda");
    let read = |name| std::fs::read_to_string(tests.join(name)).unwrap();
    let mut units = units(variant);
    units.push(read("driver.cc"));
    let flags: &[&str] = if variant.sanitized {
        &[
            "-O1",
            "-g1",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=undefined",
        ]
    } else {
        &["-O2"]
    };
    let everything = format!("{flags:?}{}{}", read("emulation.h"), units.concat());
    let hash = everything
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
    let exe = std::env::current_exe().unwrap();
    let target = exe.parent().unwrap().parent().unwrap();
    let folder = target.join(format!("cuda-mock/{hash:016x}"));
    // Tests of one process want the same library at the same time.
    static BUILDING: Mutex<()> = Mutex::new(());
    let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    if folder.join("libnvrtc.so").exists() {
        return Some(folder);
    }
    // Built aside and renamed, so that processes at the same time do not meet half a library.
    let aside = folder.with_extension(std::process::id().to_string());
    std::fs::create_dir_all(&aside).unwrap();
    compile(&aside, &tests, &units, flags);
    if std::fs::rename(&aside, &folder).is_err() {
        std::fs::remove_dir_all(&aside).unwrap();
    }
    Some(folder)
}

fn compile(folder: &Path, tests: &Path, units: &[String], flags: &[&str]) {
    let mut waiting: Vec<usize> = (0..units.len()).collect();
    let mut running = Vec::new();
    while !waiting.is_empty() || !running.is_empty() {
        while running.len() < 2
            && let Some(index) = waiting.pop()
        {
            let file = folder.join(format!("{index}.cc"));
            std::fs::write(&file, &units[index]).unwrap();
            let child = Command::new("g++")
                .args([
                    "-std=c++17",
                    "-fPIC",
                    "-Wall",
                    "-Wno-unknown-pragmas",
                    "-Werror",
                ])
                .args(flags)
                .arg("-I")
                .arg(tests)
                .arg("-c")
                .arg(&file)
                .arg("-o")
                .arg(folder.join(format!("{index}.o")))
                .spawn()
                .unwrap();
            running.push(child);
        }
        let done = running.remove(0).wait_with_output().unwrap();
        assert!(done.status.success(), "g++ refuses the emulated kernels");
    }
    let objects = (0..units.len()).map(|index| folder.join(format!("{index}.o")));
    let linked = Command::new("g++")
        .args(["-shared", "-o"])
        .arg(folder.join("libcuda.so"))
        .args(flags)
        .args(objects)
        .status()
        .unwrap();
    assert!(linked.success(), "g++ does not link the mock driver");
    std::fs::hard_link(folder.join("libcuda.so"), folder.join("libnvrtc.so")).unwrap();
}

/// What the mock driver holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Report {
    pub calls: u64,
    pub launches: u64,
    pub device_buffers: u64,
    pub device_bytes: u64,
    pub pinned: u64,
    pub streams: u64,
    pub events: u64,
    pub modules: u64,
    pub programs: u64,
    pub contexts: u64,
    pub failed: u64,
}

impl Report {
    /// What must be gone when everything was dropped.
    pub fn held(&self) -> [u64; 7] {
        [
            self.device_buffers,
            self.pinned,
            self.streams,
            self.events,
            self.modules,
            self.programs,
            self.contexts,
        ]
    }
}

/// The functions of the mock driver that no real one has.
#[derive(Debug)]
pub struct Mock(libloading::Library);

impl Mock {
    /// The driver of this process.
    pub fn new() -> Self {
        // SAFETY: the library is the mock driver; it has no initializers of note.
        Self(unsafe { libloading::Library::new("libcuda.so") }.unwrap())
    }

    /// What it holds and has done.
    pub fn report(&self) -> Report {
        let mut report = Report::default();
        // SAFETY: the function has this type.
        let ask = unsafe {
            self.0
                .get::<extern "C" fn(*mut Report) -> i32>(b"mock_report")
        };
        ask.unwrap()(&raw mut report);
        report
    }

    /// The n-th call from now fails with this code; 0: none.
    pub fn fail_at(&self, n: u64, code: i32) {
        // SAFETY: the function has this type.
        let set = unsafe {
            self.0
                .get::<extern "C" fn(u64, i32) -> i32>(b"mock_fail_at")
        };
        set.unwrap()(n, code);
    }

    /// The name of the call that was made to fail.
    pub fn failed_call(&self) -> String {
        // SAFETY: the function has this type.
        let ask = unsafe {
            self.0
                .get::<extern "C" fn() -> *const c_char>(b"mock_failed_call")
        };
        // SAFETY: a text of the library that ends with a zero byte.
        let name = unsafe { CStr::from_ptr(ask.unwrap()()) };
        name.to_string_lossy().into_owned()
    }

    /// Bytes of device memory.
    pub fn limit(&self, bytes: usize) {
        // SAFETY: the function has this type.
        let set = unsafe { self.0.get::<extern "C" fn(usize) -> i32>(b"mock_limit") };
        set.unwrap()(bytes);
    }
}
