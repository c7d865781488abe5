//! Memory of the device, and memory of the host that the device copies from and to by itself.

use std::marker::PhantomData;
use std::ptr::NonNull;

use bytemuck::Pod;
use cudarc::driver::sys;

use super::device::Device;
use super::error::{CudaError, check};

/// `len` elements on a device. Fresh memory holds anything.
#[derive(Debug)]
pub struct DeviceBuffer<T> {
    device: Device,
    at: sys::CUdeviceptr,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Pod> DeviceBuffer<T> {
    /// Takes memory for `what`.
    ///
    /// # Errors
    /// The device has too little, with the numbers.
    pub fn new(device: &Device, len: usize, what: &'static str) -> Result<Self, CudaError> {
        device.bind()?;
        // The driver gives no empty buffer.
        let bytes = len.max(1).saturating_mul(size_of::<T>());
        let mut at = 0;
        // SAFETY: writes one address; a context is current.
        let code = unsafe { sys::cuMemAlloc_v2(&raw mut at, bytes) };
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(CudaError::OutOfMemory {
                what,
                wanted_bytes: bytes as u64,
                free_bytes: device.memory()?.free_bytes,
            });
        }
        check("cuMemAlloc", code)?;
        Ok(Self {
            device: device.clone(),
            at,
            len,
            elements: PhantomData,
        })
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A number for where it is: another one, or the same place, once it was replaced.
    pub fn place(&self) -> u64 {
        self.at
    }

    /// Address of the first element, for a kernel's arguments.
    pub(super) fn address(&self) -> u64 {
        self.at
    }

    /// Address of an element; `index` may be one past the end.
    pub(super) fn address_at(&self, index: usize) -> u64 {
        assert!(index <= self.len, "element {index} of {}", self.len);
        self.at + (index * size_of::<T>()) as u64
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: ours, freed once; the driver waits for work that uses it.
            let _code = unsafe { sys::cuMemFree_v2(self.at) };
        }
    }
}

/// `len` elements of page-locked host memory, zero at first.
///
/// A copy that runs reads or writes it beside the CPU: whoever looks at it before the copy was
/// waited for may find old or mixed values. The types are plain numbers, so no worse.
#[derive(Debug)]
pub struct PinnedBuffer<T> {
    device: Device,
    at: NonNull<T>,
    len: usize,
}

// SAFETY: owns plain numbers, as a `Vec<T>` does.
unsafe impl<T: Send> Send for PinnedBuffer<T> {}
// SAFETY: shared references only read.
unsafe impl<T: Sync> Sync for PinnedBuffer<T> {}

impl<T: Pod> PinnedBuffer<T> {
    /// Takes page-locked memory, usable with every device.
    ///
    /// # Errors
    /// The system has too little.
    pub fn new(device: &Device, len: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let bytes = len.max(1).saturating_mul(size_of::<T>());
        let mut at = std::ptr::null_mut();
        // SAFETY: writes one address; a context is current.
        let code =
            unsafe { sys::cuMemHostAlloc(&raw mut at, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        check("cuMemHostAlloc", code)?;
        let Some(at) = NonNull::new(at.cast::<T>()) else {
            return Err(CudaError::Call {
                call: "cuMemHostAlloc",
                name: "no address".into(),
                fatal: false,
            });
        };
        // SAFETY: `bytes` bytes from `at` on are ours and nobody else's.
        unsafe { at.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self {
            device: device.clone(),
            at,
            len,
        })
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `len` initialized elements, aligned to a page, ours.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }

    /// The elements.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl<T> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        // Work under way may still use it, and the driver does not promise to wait.
        if self.device.synchronize().is_ok() {
            // SAFETY: ours, freed once, and the device is idle.
            let _code = unsafe { sys::cuMemFreeHost(self.at.as_ptr().cast()) };
        }
    }
}
