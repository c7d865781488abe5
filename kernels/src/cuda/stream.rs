//! Streams, events, and copies that run on them.

use std::ops::Range;
use std::time::Duration;

use bytemuck::Pod;
use cudarc::driver::sys;

use super::buffer::{DeviceBuffer, PinnedBuffer};
use super::device::Device;
use super::error::{CudaError, check};

/// A queue of work of a device; work on one stream runs in order.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    raw: sys::CUstream,
}

// SAFETY: the driver locks inside; a handle is a name.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that does not wait for the default one.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle; a context is current.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&raw mut raw, flags)
        })?;
        Ok(Self {
            device: device.clone(),
            raw,
        })
    }

    /// The device it belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Waits until all its work is done.
    ///
    /// # Errors
    /// The driver's error, of this call or of earlier work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: a live stream.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.raw)
        })
    }

    /// Later work of this stream begins after `event`.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: a live stream and a live event.
        check("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(self.raw, event.raw, 0)
        })
    }

    /// Queues a copy of `from[range]` to `to[at..]`.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Panics
    /// Outside of a buffer.
    pub fn upload<T: Pod>(
        &self,
        from: &PinnedBuffer<T>,
        range: Range<usize>,
        to: &DeviceBuffer<T>,
        at: usize,
    ) -> Result<(), CudaError> {
        let from = &from.as_slice()[range];
        if from.is_empty() {
            return Ok(());
        }
        let last = to.address_at(at + from.len());
        let bytes = size_of_val(from);
        self.device.bind()?;
        // SAFETY: both ranges are inside their buffers, which wait for copies before they go.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(last - bytes as u64, from.as_ptr().cast(), bytes, self.raw)
        })
    }

    /// Queues a copy of `from[range]` to `to[at..]`.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Panics
    /// Outside of a buffer.
    pub fn download<T: Pod>(
        &self,
        from: &DeviceBuffer<T>,
        range: Range<usize>,
        to: &mut PinnedBuffer<T>,
        at: usize,
    ) -> Result<(), CudaError> {
        let len = range.len();
        if len == 0 {
            return Ok(());
        }
        let to = &mut to.as_mut_slice()[at..at + len];
        let bytes = size_of_val(to);
        let source = from.address_at(range.end) - bytes as u64;
        self.device.bind()?;
        // SAFETY: both ranges are inside their buffers, which wait for copies before they go.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), source, bytes, self.raw)
        })
    }

    /// Queues a copy of a whole buffer over another of the same length.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn copy<T: Pod>(
        &self,
        from: &DeviceBuffer<T>,
        to: &mut DeviceBuffer<T>,
    ) -> Result<(), CudaError> {
        assert_eq!(from.len(), to.len(), "a copy of a whole buffer");
        let bytes = from.len() * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the whole of two live buffers of this length, which do not overlap.
        check("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), bytes, self.raw)
        })
    }

    /// Queues zeros over a whole buffer.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn clear<T: Pod>(&self, buffer: &mut DeviceBuffer<T>) -> Result<(), CudaError> {
        let bytes = buffer.len() * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the whole of a live buffer.
        check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(buffer.address(), 0, bytes, self.raw)
        })
    }

    /// Uploads values and waits: for weights and tables, not for steps.
    ///
    /// # Errors
    /// No memory, or the driver refuses.
    pub fn upload_now<T: Pod>(
        &self,
        values: &[T],
        what: &'static str,
    ) -> Result<DeviceBuffer<T>, CudaError> {
        let to = DeviceBuffer::new(&self.device, values.len(), what)?;
        let mut pinned = PinnedBuffer::new(&self.device, values.len().min(UPLOAD_ELEMENTS))?;
        for (index, part) in values.chunks(UPLOAD_ELEMENTS).enumerate() {
            pinned.as_mut_slice()[..part.len()].copy_from_slice(part);
            self.upload(&pinned, 0..part.len(), &to, index * UPLOAD_ELEMENTS)?;
            self.synchronize()?;
        }
        Ok(to)
    }

    /// Downloads a whole buffer and waits: for tests and tools, not for steps.
    ///
    /// # Errors
    /// No memory, or the driver refuses.
    pub fn download_now<T: Pod>(&self, from: &DeviceBuffer<T>) -> Result<Vec<T>, CudaError> {
        let mut pinned = PinnedBuffer::new(&self.device, from.len())?;
        self.download(from, 0..from.len(), &mut pinned, 0)?;
        self.synchronize()?;
        Ok(pinned.as_slice().to_vec())
    }
}

/// Elements that `upload_now` has page-locked at a time.
const UPLOAD_ELEMENTS: usize = 1 << 22;

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: ours, destroyed once; its work goes on to its end.
            let _code = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A place in a stream that others wait for.
#[derive(Debug)]
pub struct Event {
    device: Device,
    raw: sys::CUevent,
}

// SAFETY: the driver locks inside; a handle is a name.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event without timing.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        Self::with(
            device,
            sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32,
        )
    }

    /// An event that notes the time at which its stream came to it.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn timed(device: &Device) -> Result<Self, CudaError> {
        Self::with(device, sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32)
    }

    fn with(device: &Device, flags: u32) -> Result<Self, CudaError> {
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; a context is current.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&raw mut raw, flags)
        })?;
        Ok(Self {
            device: device.clone(),
            raw,
        })
    }

    /// Puts it behind all work of the stream so far.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: a live event and a live stream.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(self.raw, stream.raw)
        })
    }

    /// True when the stream has come to it.
    ///
    /// # Errors
    /// The driver's error, of this call or of earlier work.
    pub fn passed(&self) -> Result<bool, CudaError> {
        self.device.bind()?;
        // SAFETY: a live event.
        let code = unsafe { sys::cuEventQuery(self.raw) };
        if code == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        check("cuEventQuery", code)?;
        Ok(true)
    }

    /// Nanoseconds between two events that both are timed and have passed.
    ///
    /// # Errors
    /// One of them is not, or the driver's error of earlier work.
    pub fn nanoseconds_since(&self, earlier: &Self) -> Result<u64, CudaError> {
        self.device.bind()?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: live events; writes one number.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime(&raw mut milliseconds, earlier.raw, self.raw)
        })?;
        let time = Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3);
        Ok(time.map_or(0, |time| time.as_nanos() as u64))
    }

    /// Waits until the stream has come to it.
    ///
    /// # Errors
    /// The driver's error, of this call or of earlier work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: a live event.
        check("cuEventSynchronize", unsafe {
            sys::cuEventSynchronize(self.raw)
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: ours, destroyed once.
            let _code = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
