//! Compiled kernels: by NVRTC from the embedded sources and cached on disk, or prebuilt.
//!
//! A module is a set of sources with options. Its cache entry is named by a hash of sources,
//! options, device architecture and compiler, and begins with a line that says all of these; an
//! entry whose first line differs is not used. Without NVRTC, or where the driver refuses what
//! NVRTC made (a compiler newer than the driver), the prebuilt PTX for compute_80 is loaded.

use std::ffi::{CStr, CString};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::sys;
use cudarc::nvrtc::result as nvrtc;

use super::device::Device;
use super::error::{CudaError, check};

const PRELUDE: &str = include_str!("../../cuda/prelude.cu");
const GENERAL: [&str; 4] = [
    PRELUDE,
    include_str!("../../cuda/blocks.cu"),
    include_str!("../../cuda/general.cu"),
    include_str!("../../cuda/sample.cu"),
];
const ATTENTION: [&str; 2] = [PRELUDE, include_str!("../../cuda/attention.cu")];

/// PTX of the shipped modules for compute_80, each behind a line `//module OPTIONS`.
const PREBUILT: &[u8] = include_bytes!("../../cuda/compute_80.ptx.gz");

/// Bytes that the prebuilt text is allowed to take.
const PREBUILT_MAX: u64 = 64 << 20;

/// Which kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModuleSpec {
    options: Box<str>,
    sources: &'static [&'static str],
}

impl ModuleSpec {
    pub(super) fn general() -> Self {
        Self {
            options: "".into(),
            sources: &GENERAL,
        }
    }

    /// Attention for a head width and the number of an element type.
    pub(super) fn attention(head_dim: u32, kv_type: u32) -> Self {
        Self {
            options: format!("-DHEAD_DIM={head_dim} -DKV_TYPE={kv_type}").into(),
            sources: &ATTENTION,
        }
    }
}

/// Where the code of a module came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeOrigin {
    /// Compiled by NVRTC just now.
    Compiled,
    /// Compiled by NVRTC earlier and found on disk.
    Cached,
    /// Shipped with this program.
    Prebuilt,
}

/// A loaded module.
#[derive(Debug)]
pub(super) struct Module {
    device: Device,
    raw: sys::CUmodule,
    origin: CodeOrigin,
}

// SAFETY: the driver locks inside; a handle is a name.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a module; `cache` is the folder of compiled code.
    pub(super) fn load(
        device: &Device,
        spec: &ModuleSpec,
        cache: Option<&Path>,
    ) -> Result<Arc<Self>, CudaError> {
        let made = if compiler_is_there() {
            Self::compiled(device, spec, cache)
        } else {
            Err(CudaError::NotPrebuilt {
                module: spec.options.clone(),
            })
        };
        match made {
            Ok(module) => Ok(Arc::new(module)),
            Err(error) => match prebuilt(spec) {
                Some(image) => Self::from_image(device, &image, CodeOrigin::Prebuilt).map(Arc::new),
                None => Err(error),
            },
        }
    }

    pub(super) fn origin(&self) -> CodeOrigin {
        self.origin
    }

    fn compiled(
        device: &Device,
        spec: &ModuleSpec,
        cache: Option<&Path>,
    ) -> Result<Self, CudaError> {
        let entry = Entry::of(device, spec, cache)?;
        if let Some(image) = entry.read()
            && let Ok(module) = Self::from_image(device, &image, CodeOrigin::Cached)
        {
            return Ok(module);
        }
        let image = compile(&spec.sources.concat(), spec, entry.architecture)?;
        let module = Self::from_image(device, &image, CodeOrigin::Compiled)?;
        entry.write(&image);
        Ok(module)
    }

    fn from_image(device: &Device, image: &str, origin: CodeOrigin) -> Result<Self, CudaError> {
        device.bind()?;
        let text = CString::new(image).map_err(|_| CudaError::Call {
            call: "cuModuleLoadData",
            name: "code with a zero byte".into(),
            fatal: false,
        })?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: PTX text that ends with a zero byte; writes one handle.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&raw mut raw, text.as_ptr().cast())
        })?;
        Ok(Self {
            device: device.clone(),
            raw,
            origin,
        })
    }

    /// A kernel by name, allowed to use `dynamic_bytes` of shared memory a block.
    pub(super) fn kernel(
        self: &Arc<Self>,
        name: &CStr,
        dynamic_bytes: u32,
    ) -> Result<Kernel, CudaError> {
        self.device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live module and a name that ends with a zero byte; writes one handle.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&raw mut raw, self.raw, name.as_ptr())
        })?;
        // More than 48 KiB has to be asked for.
        if dynamic_bytes > 48 << 10 {
            use sys::CUfunction_attribute_enum as Attribute;
            let which = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a live function.
            check("cuFuncSetAttribute", unsafe {
                sys::cuFuncSetAttribute(raw, which, dynamic_bytes as i32)
            })?;
        }
        Ok(Kernel {
            raw,
            dynamic_bytes,
            module: Arc::clone(self),
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: ours, unloaded once; kernels keep it alive.
            let _code = unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

/// A function of a module, which it keeps loaded.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) raw: sys::CUfunction,
    pub(super) dynamic_bytes: u32,
    module: Arc<Module>,
}

// SAFETY: the driver locks inside; a handle is a name.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    pub(super) fn origin(&self) -> CodeOrigin {
        self.module.origin()
    }
}

/// The place of a module in the cache of compiled code.
struct Entry {
    path: Option<PathBuf>,
    head: String,
    architecture: (i32, i32),
}

impl Entry {
    fn of(device: &Device, spec: &ModuleSpec, cache: Option<&Path>) -> Result<Self, CudaError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is there; writes two numbers.
        let code =
            unsafe { cudarc::nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor) }.result();
        code.map_err(|error| refused(spec, error))?;
        let architecture = device.compute();
        let hash = xxhash_rust::xxh3::xxh3_128(spec.sources.concat().as_bytes());
        let head = format!(
            "//module {}\n//compute {}{} nvrtc {major}.{minor} sources {hash:032x}\n",
            spec.options, architecture.0, architecture.1
        );
        let name = xxhash_rust::xxh3::xxh3_128(head.as_bytes());
        Ok(Self {
            path: cache.map(|folder| folder.join(format!("{name:032x}.ptx"))),
            head,
            architecture,
        })
    }

    fn read(&self) -> Option<String> {
        let text = std::fs::read_to_string(self.path.as_ref()?).ok()?;
        text.starts_with(&self.head).then_some(text)
    }

    /// Keeps the code for the next start; a disk that refuses costs a compilation, no more.
    fn write(&self, image: &str) {
        let Some(path) = &self.path else { return };
        let Some(folder) = path.parent() else { return };
        let fresh = path.with_extension(format!("{}.new", std::process::id()));
        let text = format!("{}{}", self.head, without_module_line(image));
        let kept = std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(&fresh, text))
            .and_then(|()| std::fs::rename(&fresh, path));
        if kept.is_err() {
            let _gone = std::fs::remove_file(&fresh);
        }
    }
}

fn without_module_line(image: &str) -> &str {
    match image.split_once('\n') {
        Some((first, rest)) if first.starts_with("//module ") => rest,
        _ => image,
    }
}

fn compiler_is_there() -> bool {
    // SAFETY: only opens the library; nothing of it runs but its initializers.
    unsafe { cudarc::nvrtc::sys::is_culib_present() }
}

fn refused(spec: &ModuleSpec, error: nvrtc::NvrtcError) -> CudaError {
    CudaError::Compile {
        module: spec.options.clone(),
        log: format!("{:?}", error.0).into(),
    }
}

/// A program of NVRTC, destroyed at its end.
struct Program(cudarc::nvrtc::sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `create_program`, destroyed once.
        let _code = unsafe { nvrtc::destroy_program(self.0) };
    }
}

fn compile(source: &str, spec: &ModuleSpec, architecture: (i32, i32)) -> Result<String, CudaError> {
    let wrap = |error| refused(spec, error);
    let source = CString::new(source).map_err(|_| CudaError::Compile {
        module: spec.options.clone(),
        log: "a source with a zero byte".into(),
    })?;
    let program = Program(nvrtc::create_program(&source, Some(c"rootstock.cu")).map_err(wrap)?);
    let (major, minor) = architecture;
    let target = format!("--gpu-architecture=compute_{major}{minor}");
    let mut options = vec![target.as_str(), "--std=c++17", "-default-device"];
    options.extend(spec.options.split_whitespace());
    // SAFETY: a live program.
    if let Err(error) = unsafe { nvrtc::compile_program(program.0, &options) } {
        // SAFETY: a live program.
        let log = unsafe { nvrtc::get_program_log(program.0) };
        let log = log.map(|log| text(&log)).unwrap_or_default();
        return Err(CudaError::Compile {
            module: spec.options.clone(),
            log: format!("{:?} {}", error.0, log.trim()).into(),
        });
    }
    // SAFETY: a live program that was compiled.
    let ptx = unsafe { nvrtc::get_ptx(program.0) }.map_err(wrap)?;
    Ok(text(&ptx))
}

/// Characters up to the zero byte.
fn text(bytes: &[std::ffi::c_char]) -> String {
    let bytes: &[u8] = bytemuck::cast_slice(bytes);
    let text = CStr::from_bytes_until_nul(bytes).unwrap_or_default();
    text.to_string_lossy().into_owned()
}

/// The prebuilt code of a module, with its line.
fn prebuilt(spec: &ModuleSpec) -> Option<String> {
    let mut all = String::new();
    let mut reader = flate2::read::GzDecoder::new(PREBUILT).take(PREBUILT_MAX);
    reader.read_to_string(&mut all).ok()?;
    let wanted = format!("{}\n", spec.options);
    let part = all
        .split("//module ")
        .skip(1)
        .find(|part| part.starts_with(&wanted))?;
    Some(format!("//module {part}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_modules_are_prebuilt_and_others_are_not() {
        for head_dim in [64, 80, 96, 128, 256] {
            for kv_type in 0..5 {
                let code = prebuilt(&ModuleSpec::attention(head_dim, kv_type)).unwrap();
                assert!(
                    code.contains(".entry attention_decode_4"),
                    "{head_dim} {kv_type}"
                );
                assert!(code.contains(".target sm_80"));
                // What the oldest driver that is taken knows: CUDA 11.4.
                assert!(code.contains(".version 7.4\n"));
                assert_eq!(code.contains(".entry attention_prefill"), kv_type != 0);
            }
        }
        assert!(
            prebuilt(&ModuleSpec::general())
                .unwrap()
                .contains(".entry sample")
        );
        assert!(prebuilt(&ModuleSpec::attention(48, 1)).is_none());
    }

    #[test]
    fn sources_include_nothing() {
        for source in GENERAL.iter().chain(&ATTENTION) {
            assert!(!source.contains("#include"));
        }
    }
}
