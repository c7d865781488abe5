//! Graphs: what a stream was given once, kept by the driver and started again by one call.
//!
//! The launches of a decode step are many and small, and each costs the CPU a call. Captured on a
//! stream of their own they become a graph, whose arguments stay as they were: whatever changes
//! from step to step is read from device memory. Drivers have the calls since CUDA 11.4; they are
//! looked for by name, because the binding would panic where one is missing.

use cudarc::driver::sys;

use super::device::Device;
use super::error::{CudaError, check};
use super::stream::Stream;

/// The calls of the driver that this file makes.
const CALLS: [&str; 7] = [
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphUpload",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
];

/// Captured work of a device, ready to be started.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    exec: sys::CUgraphExec,
    bytes: u64,
}

// SAFETY: the driver locks inside; a handle is a name.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

/// What a capture gave, destroyed once it was instantiated.
struct Template(sys::CUgraph);

impl Drop for Template {
    fn drop(&mut self) {
        // SAFETY: ours, destroyed once; graphs made from it do not need it.
        let _code = unsafe { sys::cuGraphDestroy(self.0) };
    }
}

impl Graph {
    /// The first call that the driver of this device lacks; None: graphs can be captured.
    pub fn missing_call(_device: &Device) -> Option<&'static str> {
        // SAFETY: a device is open, so the library is there.
        let library = unsafe { sys::culib() };
        CALLS.into_iter().find(|name| {
            // SAFETY: only looked for; as a plain address it is never called.
            unsafe { library.get::<*const ()>(name.as_bytes()) }.is_err()
        })
    }

    /// Captures what `work` queues on the stream that it is given, and nothing of it runs. `work`
    /// must not take or give back memory, nor wait.
    ///
    /// # Errors
    /// The driver refuses, or `work` fails.
    ///
    /// # Panics
    /// Where [`Graph::missing_call`] names one.
    pub fn capture(
        device: &Device,
        work: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        // Of its own, so that a capture that goes wrong leaves nobody's stream in a strange state.
        let stream = Stream::new(device)?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a live stream.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(stream.raw(), mode)
        })?;
        let done = work(&stream);
        let template = end(&stream).or_else(|_| end(&stream));
        done?;
        let template = template?;
        let before = device.memory()?.free_bytes;
        let mut exec = std::ptr::null_mut();
        // SAFETY: a live template; writes one handle.
        check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&raw mut exec, template.0, 0)
        })?;
        let mut graph = Self {
            device: device.clone(),
            exec,
            bytes: 0,
        };
        // What the device needs of it goes there now, so that it can be counted.
        // SAFETY: a live graph and a live stream.
        check("cuGraphUpload", unsafe {
            sys::cuGraphUpload(graph.exec, stream.raw())
        })?;
        stream.synchronize()?;
        graph.bytes = before.saturating_sub(device.memory()?.free_bytes);
        Ok(graph)
    }

    /// Bytes by which the device had less free memory once it was there.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Queues all of it.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: a live graph and a live stream; what its kernels were given is alive, because
        // the caller compared the places of all buffers with those at capture.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(self.exec, stream.raw())
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // It may be running.
        if self.device.synchronize().is_ok() {
            // SAFETY: ours, destroyed once, and the device is idle.
            let _code = unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}

/// Ends the capture of a stream.
fn end(stream: &Stream) -> Result<Template, CudaError> {
    let mut template = std::ptr::null_mut();
    // SAFETY: a live stream that captures; writes one handle.
    check("cuStreamEndCapture", unsafe {
        sys::cuStreamEndCapture(stream.raw(), &raw mut template)
    })?;
    Ok(Template(template))
}
