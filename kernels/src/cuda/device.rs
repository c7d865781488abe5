//! One device: found at run time, or an error that says why not.
//!
//! The binding panics when a library is missing, so the library is probed before the first call;
//! all functions used here exist since CUDA 11.4, and an older driver is refused by its version.

use std::ffi::{CStr, c_int};
use std::sync::Arc;

use cudarc::driver::sys;

use super::error::{CudaError, check, no_device};

/// The oldest driver taken: CUDA 11.4.
const DRIVER_MIN: c_int = 11_040;

/// The oldest device taken: compute capability 8.0, for bf16 and the shape of the products.
const COMPUTE_MIN: (c_int, c_int) = (8, 0);

/// A device with its primary context, shared by everything made on it.
#[derive(Clone, Debug)]
pub struct Device(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    ordinal: u32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    name: Box<str>,
    compute: (c_int, c_int),
    multiprocessors: u32,
    shared_bytes_max: u32,
}

// SAFETY: a context may be current in several threads at once; the driver locks inside.
unsafe impl Send for Inner {}
// SAFETY: as above; nothing of the structure changes after it was made.
unsafe impl Sync for Inner {}

/// Free and total bytes of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes nobody has.
    pub free_bytes: u64,
    /// Bytes of the device.
    pub total_bytes: u64,
}

impl Device {
    /// Devices that this process sees.
    ///
    /// # Errors
    /// No driver library, a driver older than CUDA 11.4, or one that finds no device.
    pub fn count() -> Result<u32, CudaError> {
        // SAFETY: only opens the library; nothing of it runs but its initializers.
        if !unsafe { sys::is_culib_present() } {
            return Err(no_device(
                "the driver library (libcuda) is not installed on this machine",
            ));
        }
        // SAFETY: the library is there; initialization has no other condition.
        let code = unsafe { sys::cuInit(0) };
        if code != sys::CUresult::CUDA_SUCCESS {
            return Err(no_device(format!("cuInit answers {code:?}")));
        }
        let mut version = 0;
        // SAFETY: writes one number.
        let code = unsafe { sys::cuDriverGetVersion(&raw mut version) };
        check("cuDriverGetVersion", code)?;
        if version < DRIVER_MIN {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(no_device(format!(
                "the driver knows CUDA {major}.{minor}, at least 11.4 is needed"
            )));
        }
        let mut count = 0;
        // SAFETY: writes one number.
        check("cuDeviceGetCount", unsafe {
            sys::cuDeviceGetCount(&raw mut count)
        })?;
        Ok(count.unsigned_abs())
    }

    /// Opens the device with this number.
    ///
    /// # Errors
    /// As [`Device::count`]; there are fewer devices; it is older than compute capability 8.0.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(no_device(format!(
                "number {ordinal} was asked for, the driver finds {count}"
            )));
        }
        let mut device = 0;
        // SAFETY: writes one handle.
        check("cuDeviceGet", unsafe {
            sys::cuDeviceGet(&raw mut device, ordinal as c_int)
        })?;
        let name = name_of(device)?;
        use sys::CUdevice_attribute_enum as Attribute;
        let read = |which| attribute(device, which);
        let compute = (
            read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if compute < COMPUTE_MIN {
            let ((major, minor), (least, _)) = (compute, COMPUTE_MIN);
            return Err(no_device(format!(
                "{name} has compute capability {major}.{minor}, at least {least}.0 is needed"
            )));
        }
        let multiprocessors = read(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared = read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle; released when the last user is gone.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, device)
        })?;
        let opened = Self(Arc::new(Inner {
            ordinal,
            device,
            context,
            name,
            compute,
            multiprocessors: multiprocessors.unsigned_abs(),
            shared_bytes_max: shared.unsigned_abs(),
        }));
        opened.bind()?;
        Ok(opened)
    }

    /// The number it was opened by.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// The name the driver gives it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Major and minor compute capability.
    pub fn compute(&self) -> (i32, i32) {
        self.0.compute
    }

    /// Multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.0.multiprocessors
    }

    /// Shared memory that one block can be given.
    pub fn shared_bytes_max(&self) -> u32 {
        self.0.shared_bytes_max
    }

    /// Free and total memory now.
    ///
    /// # Errors
    /// The driver does not say.
    pub fn memory(&self) -> Result<DeviceMemory, CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers; a context is current.
        check("cuMemGetInfo", unsafe {
            sys::cuMemGetInfo_v2(&raw mut free, &raw mut total)
        })?;
        Ok(DeviceMemory {
            free_bytes: free as u64,
            total_bytes: total as u64,
        })
    }

    /// Makes the context current in this thread; every use of the driver begins with it.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as this value.
        check("cuCtxSetCurrent", unsafe {
            sys::cuCtxSetCurrent(self.0.context)
        })
    }

    /// Waits until the device has nothing to do.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: a context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`. The result is of no use: nobody is left to tell.
        let _code = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

fn name_of(device: sys::CUdevice) -> Result<Box<str>, CudaError> {
    let mut name = [0_u8; 128];
    let len = name.len() as c_int;
    // SAFETY: writes at most `len` bytes.
    let code = unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), len, device) };
    check("cuDeviceGetName", code)?;
    let text = CStr::from_bytes_until_nul(&name).unwrap_or_default();
    Ok(text.to_string_lossy().into())
}

fn attribute(
    device: sys::CUdevice,
    which: sys::CUdevice_attribute_enum,
) -> Result<c_int, CudaError> {
    let mut value = 0;
    // SAFETY: writes one number.
    let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) };
    check("cuDeviceGetAttribute", code)?;
    Ok(value)
}
