//! Builds the mock driver over the emulated kernels with g++, and runs tests in a child process
//! that finds it as libcuda, libnvrtc and libcublasLt.
//!
//! Each translation unit is compiled once for its content and kept in the target folder, so a
//! fault costs the units it is in. Sanitized variants are built with AddressSanitizer and
//! UndefinedBehaviorSanitizer, which the child needs before anything else is loaded; the others
//! are many times faster. Without g++ a test prints that it was skipped.
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
    /// File below `kernels/cuda`, or the mock driver's.
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

/// How a test of this binary went over a library with a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// There is no g++.
    NotRun,
    Passed,
    /// With what said so: the comparison, the emulation or a sanitizer.
    Failed(String),
}

/// Runs `body_of`, a test of this binary, over a library with a fault.
pub fn outcome_with(body_of: &str, variant: &Variant, environment: &[(&str, &str)]) -> Outcome {
    let Some(output) = run_child(body_of, body_of, variant, environment) else {
        return Outcome::NotRun;
    };
    let text = text(&output);
    assert!(
        text.contains("running 1 test"),
        "the child ran nothing:\n{text}"
    );
    if output.status.success() {
        return Outcome::Passed;
    }
    let finders = [
        ("emulation: ", "the emulation"),
        ("ERROR: AddressSanitizer", "AddressSanitizer"),
        ("runtime error: ", "UndefinedBehaviorSanitizer"),
        ("panicked at", "the comparison"),
    ];
    let found = finders.iter().find(|(mark, _)| text.contains(mark));
    let Some((mark, finder)) = found else {
        panic!("the child failed without a reason:\n{text}");
    };
    let line = text.lines().skip_while(|line| !line.contains(mark));
    // A panic says where first, and then what.
    let line = line.take(2).map(str::trim).collect::<Vec<_>>().join(" ");
    let shown: String = line.chars().take(160).collect();
    println!("      {shown}");
    Outcome::Failed((*finder).to_owned())
}

/// Plants `fault` into `variant` and runs `test` in some orders of the warps until it fails:
/// first as it is, then under the sanitizers. Says which test found it and by what; false when
/// nothing did.
fn catch(test: &str, variant: &Variant, fault: Fault) -> bool {
    for sanitized in [false, true] {
        let variant = Variant {
            fault: Some(fault),
            sanitized,
            ..*variant
        };
        // A missing barrier shows in some orders only.
        for seed in ["0", "3", "5", "9"] {
            let environment = [("EMULATION_SEED", seed), ("EMULATED_CASES", "8")];
            match outcome_with(test, &variant, &environment) {
                Outcome::NotRun => return true,
                Outcome::Passed => {}
                Outcome::Failed(finder) => {
                    println!("    | {} | {test} | {finder} |", fault.name);
                    return true;
                }
            }
        }
    }
    println!("    | {} | {test} | not caught |", fault.name);
    false
}

/// Plants each fault where its test is to find it.
///
/// # Panics
/// When one of them was not caught.
pub fn catch_all(faults: &[(&str, Fault)], variant: &Variant) {
    let missed: Vec<&str> = faults
        .iter()
        .filter(|(test, fault)| !catch(test, variant, *fault))
        .map(|(_, fault)| fault.name)
        .collect();
    assert!(missed.is_empty(), "not caught: {missed:?}");
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
    with_fault(name, source, fault)
}

/// A source with the fault, where it is in this one.
fn with_fault(name: &str, source: String, fault: Option<Fault>) -> String {
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
    for name in ["blocks.cu", "general.cu", "sample.cu"] {
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

/// Of a content, for the name of what was made from it.
fn hash(content: &str) -> u64 {
    let bytes = content.bytes();
    bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The folder with the built library; None without g++.
pub fn build(variant: &Variant) -> Option<PathBuf> {
    Command::new("g++").arg("--version").output().ok()?;
    let tests = repository().join("kernels/tests/cuda");
    let read = |name| std::fs::read_to_string(tests.join(name)).unwrap();
    let mut units = units(variant);
    let mut driver = with_fault("driver.cc", read("driver.cc"), variant.fault);
    driver.push_str(&with_fault("blas.cc", read("blas.cc"), variant.fault));
    units.push(driver);
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
    let with = format!("{flags:?}{}", read("emulation.h"));
    let exe = std::env::current_exe().unwrap();
    let target = exe.parent().unwrap().parent().unwrap();
    let kept = target.join("cuda-mock");
    let objects: Vec<PathBuf> = units
        .iter()
        .map(|unit| kept.join(format!("{:016x}.o", hash(&format!("{with}{unit}")))))
        .collect();
    let folder = kept.join(format!("{:016x}", hash(&format!("{objects:?}"))));
    // Tests of one process want the same library at the same time.
    static BUILDING: Mutex<()> = Mutex::new(());
    let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    if folder.join("libnvrtc.so").exists() {
        return Some(folder);
    }
    // Built aside and renamed, so that processes at the same time do not meet half a library.
    let aside = folder.with_extension(std::process::id().to_string());
    std::fs::create_dir_all(&aside).unwrap();
    compile(&aside, &tests, (&units, &objects), flags);
    link(&aside, &objects, flags);
    if std::fs::rename(&aside, &folder).is_err() {
        std::fs::remove_dir_all(&aside).unwrap();
    }
    Some(folder)
}

/// Compiles the units whose objects are not there, two at a time.
fn compile(aside: &Path, tests: &Path, (units, objects): (&[String], &[PathBuf]), flags: &[&str]) {
    let mut waiting: Vec<usize> = (0..units.len()).collect();
    waiting.retain(|index| !objects[*index].exists());
    let mut running = Vec::new();
    while !waiting.is_empty() || !running.is_empty() {
        while running.len() < 2
            && let Some(index) = waiting.pop()
        {
            let file = aside.join(format!("{index}.cc"));
            std::fs::write(&file, &units[index]).unwrap();
            let always = [
                "-std=c++17",
                "-fPIC",
                "-Wall",
                "-Wno-unknown-pragmas",
                "-Werror",
            ];
            let child = Command::new("g++")
                .args(always)
                .args(flags)
                .arg("-I")
                .arg(tests)
                .arg("-c")
                .arg(&file)
                .arg("-o")
                .arg(aside.join(format!("{index}.o")))
                .spawn()
                .unwrap();
            running.push((index, child));
        }
        let (index, child) = running.remove(0);
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success(), "g++ refuses the emulated kernels");
        std::fs::rename(aside.join(format!("{index}.o")), &objects[index]).unwrap();
    }
}

fn link(aside: &Path, objects: &[PathBuf], flags: &[&str]) {
    let linked = Command::new("g++")
        .args(["-shared", "-o"])
        .arg(aside.join("libcuda.so"))
        .args(flags)
        .args(objects)
        .status()
        .unwrap();
    assert!(linked.success(), "g++ does not link the mock driver");
    for name in ["libnvrtc.so", "libcublasLt.so"] {
        std::fs::hard_link(aside.join("libcuda.so"), aside.join(name)).unwrap();
    }
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
    pub graphs: u64,
    pub graph_launches: u64,
    pub library: u64,
    pub products: u64,
}

impl Report {
    /// What must be gone when everything was dropped.
    pub fn held(&self) -> [u64; 9] {
        [
            self.device_buffers,
            self.pinned,
            self.streams,
            self.events,
            self.modules,
            self.programs,
            self.contexts,
            self.graphs,
            self.library,
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
