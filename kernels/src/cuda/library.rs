//! Products by cuBLASLt, where it is installed: for many tokens and 16-bit weights.
//!
//! The library is looked for by name, and so is each of its functions, because the binding would
//! panic where one is missing. Its matrices have columns one after another, ours rows: weights
//! `[rows][cols]` are its `cols x rows` matrix, turned; inputs `[n][cols]` its `cols x n`, results
//! `[n][rows]` its `rows x n`. An algorithm is chosen once for a shape. What the library refuses,
//! now or later, is computed by our own kernels: an error of it is never one of a step.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::sys;

use super::buffer::DeviceBuffer;
use super::device::Device;
use super::error::CudaError;
use super::product::WeightType;
use super::stream::Stream;

/// The functions of the library that this file calls.
const CALLS: [&str; 13] = [
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetVersion",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
];

/// The oldest version taken: of CUDA 11.4.
const VERSION_MIN: usize = 110_500;

/// Tokens from which on the library is asked.
pub(super) const LIBRARY_LEAST: u32 = 32;

/// Bytes that its algorithms may use beside the matrices.
const WORKSPACE_BYTES: usize = 32 << 20;

/// `CUBLAS_OP_T`.
const TURNED: i32 = 1;

/// Shapes whose algorithm is remembered.
const PLANS_MAX: usize = 512;

/// cuBLASLt on one device, for one stream of work.
#[derive(Debug)]
pub struct ProductLibrary {
    device: Device,
    handle: sys::cublasLtHandle_t,
    version: usize,
    workspace: DeviceBuffer<u8>,
    state: Mutex<State>,
}

// SAFETY: the library locks inside; a handle is a name.
unsafe impl Send for ProductLibrary {}
// SAFETY: as above; what changes is behind a lock.
unsafe impl Sync for ProductLibrary {}

#[derive(Debug)]
struct State {
    /// Inputs in the weights' type; grows.
    narrow: DeviceBuffer<u16>,
    /// None: the library has no algorithm for this shape.
    plans: BTreeMap<Shape, Option<Plan>>,
}

/// What an algorithm is chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Shape {
    pub(super) rows: u32,
    pub(super) cols: u32,
    pub(super) n: u32,
    /// Bf16, not F16.
    pub(super) brain: bool,
    pub(super) bias: bool,
}

/// Addresses of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    pub(super) weights: u64,
    /// Of the weights' type.
    pub(super) x: u64,
    pub(super) out: u64,
    /// 0: none.
    pub(super) bias: u64,
    pub(super) add: bool,
}

impl ProductLibrary {
    /// Opens it for a device.
    ///
    /// # Errors
    /// It is not installed, too old, or refuses; no memory for its workspace.
    pub fn open(device: &Device) -> Result<Self, CudaError> {
        device.bind()?;
        // SAFETY: only opens the library; nothing of it runs but its initializers.
        if !unsafe { sys::is_culib_present() } {
            return Err(none("it is not installed on this machine"));
        }
        // SAFETY: the library is there.
        let library = unsafe { sys::culib() };
        for name in CALLS {
            // SAFETY: only looked for; as a plain address it is never called.
            if unsafe { library.get::<*const ()>(name.as_bytes()) }.is_err() {
                return Err(none(format!("it has no {name}")));
            }
        }
        // SAFETY: the function is there, and has no condition.
        let version = unsafe { sys::cublasLtGetVersion() };
        if version < VERSION_MIN {
            return Err(none(format!(
                "version {version} is too old, at least {VERSION_MIN} is needed"
            )));
        }
        let workspace = DeviceBuffer::new(device, WORKSPACE_BYTES, "workspace of cuBLASLt")?;
        let narrow = DeviceBuffer::new(device, 0, "inputs of cuBLASLt")?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle; a context is current.
        check("cublasLtCreate", unsafe {
            sys::cublasLtCreate(&raw mut handle)
        })?;
        Ok(Self {
            device: device.clone(),
            handle,
            version,
            workspace,
            state: Mutex::new(State {
                narrow,
                plans: BTreeMap::new(),
            }),
        })
    }

    /// Its version, part of what identifies results.
    pub fn version(&self) -> usize {
        self.version
    }

    /// Where its buffers are.
    pub fn places(&self) -> [u64; 2] {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        [self.workspace.place(), state.narrow.place()]
    }

    /// Bytes of device memory that it takes at once.
    pub const fn workspace_bytes() -> u64 {
        WORKSPACE_BYTES as u64
    }

    /// Room for `len` inputs in the weights' type, and its address.
    pub(super) fn room(&self, len: usize) -> Result<u64, CudaError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.narrow.len() < len {
            let len = len.next_power_of_two();
            state.narrow = DeviceBuffer::new(&self.device, len, "inputs of cuBLASLt")?;
        }
        Ok(state.narrow.address())
    }

    /// Whether there is an algorithm for this shape; `bias` is one of those it will be used with.
    pub(super) fn knows(&self, shape: Shape, bias: u64) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.plans.len() >= PLANS_MAX && !state.plans.contains_key(&shape) {
            state.plans.clear();
        }
        let plan = state.plans.entry(shape);
        plan.or_insert_with(|| Plan::choose(self.handle, shape, bias).ok())
            .is_some()
    }

    /// Queues a product. False: the library refuses, now and from now on, and nothing was queued.
    ///
    /// The caller has checked that the operands are as long as the shape says.
    pub(super) fn product(&self, stream: &Stream, shape: Shape, operands: &Operands) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(plan) = state.plans.get_mut(&shape) else {
            return false;
        };
        let queued = plan.as_ref().is_some_and(|plan| {
            plan.queue(self.handle, stream, operands, &self.workspace)
                .is_ok()
        });
        if !queued {
            *plan = None;
        }
        queued
    }
}

impl Drop for ProductLibrary {
    fn drop(&mut self) {
        // Its work may be under way.
        if self.device.synchronize().is_ok() {
            // SAFETY: ours, destroyed once, and the device is idle.
            let _code = unsafe { sys::cublasLtDestroy(self.handle) };
        }
    }
}

/// A product of one shape, as the library wants it described.
#[derive(Debug)]
struct Plan {
    product: Description,
    weights: Layout,
    x: Layout,
    out: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Plan {
    fn choose(handle: sys::cublasLtHandle_t, shape: Shape, bias: u64) -> Result<Self, CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let [rows, cols, n] = [shape.rows, shape.cols, shape.n].map(u64::from);
        let narrow = if shape.brain {
            sys::cudaDataType::CUDA_R_16BF
        } else {
            sys::cudaDataType::CUDA_R_16F
        };
        let wide = sys::cudaDataType::CUDA_R_32F;
        let product = Description::new()?;
        product.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, TURNED)?;
        if shape.bias {
            let with_bias = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as i32;
            product.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, with_bias)?;
            product.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
        }
        let (weights, x) = (
            Layout::new(narrow, cols, rows)?,
            Layout::new(narrow, cols, n)?,
        );
        let out = Layout::new(wide, rows, n)?;
        let preference = Preference::new(WORKSPACE_BYTES)?;
        let (mut found, mut count) = (std::mem::MaybeUninit::uninit(), 0);
        // SAFETY: live descriptions; room for one result, and one number.
        check("cublasLtMatmulAlgoGetHeuristic", unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                product.0,
                weights.0,
                x.0,
                out.0,
                out.0,
                preference.0,
                1,
                found.as_mut_ptr(),
                &raw mut count,
            )
        })?;
        if count < 1 {
            return Err(none("it has no algorithm for this shape"));
        }
        // SAFETY: the library says that it wrote one.
        let found: sys::cublasLtMatmulHeuristicResult_t = unsafe { found.assume_init() };
        check("cublasLtMatmulAlgoGetHeuristic", found.state)?;
        Ok(Self {
            product,
            weights,
            x,
            out,
            algorithm: found.algo,
        })
    }

    fn queue(
        &self,
        handle: sys::cublasLtHandle_t,
        stream: &Stream,
        operands: &Operands,
        workspace: &DeviceBuffer<u8>,
    ) -> Result<(), CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        stream.device().bind()?;
        if operands.bias != 0 {
            let which = Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            self.product.set(which, operands.bias)?;
        }
        let (one, kept) = (1.0_f32, if operands.add { 1.0_f32 } else { 0.0 });
        let out = operands.out as *mut c_void;
        // SAFETY: live descriptions, whose sizes the caller compared with the operands; the
        // workspace is as long as its size, and one stream at a time uses it.
        check("cublasLtMatmul", unsafe {
            sys::cublasLtMatmul(
                handle,
                self.product.0,
                (&raw const one).cast(),
                operands.weights as *const c_void,
                self.weights.0,
                operands.x as *const c_void,
                self.x.0,
                (&raw const kept).cast(),
                out,
                self.out.0,
                out,
                self.out.0,
                &raw const self.algorithm,
                workspace.address() as *mut c_void,
                workspace.len(),
                stream.raw().cast(),
            )
        })
    }
}

#[derive(Debug)]
struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn new() -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        // SAFETY: writes one handle.
        check("cublasLtMatmulDescCreate", unsafe {
            sys::cublasLtMatmulDescCreate(&raw mut raw, compute, sys::cudaDataType::CUDA_R_32F)
        })?;
        Ok(Self(raw))
    }

    fn set<T: bytemuck::Pod>(
        &self,
        which: sys::cublasLtMatmulDescAttributes_t,
        value: T,
    ) -> Result<(), CudaError> {
        // SAFETY: a live description; reads as many bytes as the value has.
        check("cublasLtMatmulDescSetAttribute", unsafe {
            sys::cublasLtMatmulDescSetAttribute(
                self.0,
                which,
                (&raw const value).cast(),
                size_of::<T>(),
            )
        })
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: ours, destroyed once.
        let _code = unsafe { sys::cublasLtMatmulDescDestroy(self.0) };
    }
}

#[derive(Debug)]
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// A matrix whose columns of `height` elements lie one after another without gaps.
    fn new(element: sys::cudaDataType, height: u64, width: u64) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        let height_signed = height.cast_signed();
        // SAFETY: writes one handle.
        check("cublasLtMatrixLayoutCreate", unsafe {
            sys::cublasLtMatrixLayoutCreate(&raw mut raw, element, height, width, height_signed)
        })?;
        Ok(Self(raw))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: ours, destroyed once.
        let _code = unsafe { sys::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(workspace: usize) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check("cublasLtMatmulPreferenceCreate", unsafe {
            sys::cublasLtMatmulPreferenceCreate(&raw mut raw)
        })?;
        let preference = Self(raw);
        let which =
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: a live preference; reads one number of 64 bits.
        check("cublasLtMatmulPreferenceSetAttribute", unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(
                raw,
                which,
                (&raw const workspace).cast(),
                size_of::<usize>(),
            )
        })?;
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: ours, destroyed once.
        let _code = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

/// Whether the library takes weights of this type, and which; None: it does not.
pub(super) fn brain(weight_type: WeightType) -> Option<bool> {
    match weight_type {
        WeightType::F16 => Some(false),
        WeightType::Bf16 => Some(true),
        WeightType::F32 => None,
    }
}

fn none(reason: impl Into<Box<str>>) -> CudaError {
    CudaError::NoLibrary {
        reason: reason.into(),
    }
}

fn check(call: &'static str, status: sys::cublasStatus_t) -> Result<(), CudaError> {
    if status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(CudaError::Call {
        call,
        name: format!("{status:?}").into(),
        fatal: false,
    })
}
