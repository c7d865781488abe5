//! What can go wrong between here and a CUDA device, with the call and the numbers.

use cudarc::driver::sys::CUresult;

use crate::cpu::KernelError;

/// A device that cannot be used, or a call that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no device to use, for this reason.
    #[error("no CUDA device: {reason}")]
    NoDevice {
        /// What is missing or too old.
        reason: Box<str>,
    },
    /// A call of the driver failed.
    #[error("{call} failed: {name}")]
    Call {
        /// The function of the driver.
        call: &'static str,
        /// The driver's name of the error.
        name: Box<str>,
        /// True when no later call on this device can succeed.
        fatal: bool,
    },
    /// The device has too little memory.
    #[error("{wanted_bytes} bytes of device memory wanted for {what}, {free_bytes} are free")]
    OutOfMemory {
        /// What it was for.
        what: &'static str,
        /// Bytes asked for.
        wanted_bytes: u64,
        /// Bytes that were free.
        free_bytes: u64,
    },
    /// NVRTC refused the source.
    #[error("the kernels {module} cannot be compiled: {log}")]
    Compile {
        /// Options of the module.
        module: Box<str>,
        /// The compiler's words, or its error.
        log: Box<str>,
    },
    /// No compiler is there, and this module is not among the prebuilt ones.
    #[error(
        "no kernels for {module}: NVRTC 12 is not installed, and prebuilt are head widths 64, 80, \
         96, 128 and 256 only"
    )]
    NotPrebuilt {
        /// Options of the module.
        module: Box<str>,
    },
    /// cuBLASLt cannot be used, for this reason.
    #[error("no cuBLASLt: {reason}")]
    NoLibrary {
        /// What is missing or too old.
        reason: Box<str>,
    },
    /// A shape that the kernels do not compute.
    #[error(transparent)]
    Shape(#[from] KernelError),
}

impl CudaError {
    /// True when the device is lost: no later step can run.
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Call { fatal: true, .. })
    }
}

/// The result of a call of the driver.
pub(super) fn check(call: &'static str, code: CUresult) -> Result<(), CudaError> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let fatal = matches!(
        code,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_DEINITIALIZED
    );
    Err(CudaError::Call {
        call,
        name: format!("{code:?}").into(),
        fatal,
    })
}

pub(super) fn no_device(reason: impl Into<Box<str>>) -> CudaError {
    CudaError::NoDevice {
        reason: reason.into(),
    }
}
