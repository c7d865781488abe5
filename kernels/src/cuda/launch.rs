//! The launch of a kernel: one place that hands arguments to the driver.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::args::Args;
use super::error::{CudaError, check};
use super::module::Kernel;
use super::stream::Stream;

/// Blocks in x, y and z, and threads of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) x: u32,
    pub(super) y: u32,
    pub(super) z: u32,
    pub(super) threads: u32,
}

impl Grid {
    pub(super) fn line(blocks: u32, threads: u32) -> Self {
        Self {
            x: blocks,
            y: 1,
            z: 1,
            threads,
        }
    }
}

/// Queues a kernel. Nothing is launched for an empty grid.
///
/// The caller has checked that everything `args` points to is as long as the kernel's shape says,
/// belongs to the stream's device, and that `args` is the structure this kernel takes.
pub(super) fn launch<T: Args>(
    stream: &Stream,
    name: &'static str,
    kernel: &Kernel,
    grid: Grid,
    args: &T,
) -> Result<(), CudaError> {
    if grid.x == 0 || grid.y == 0 || grid.z == 0 {
        return Ok(());
    }
    stream.device().bind()?;
    let mut copy = *args;
    let mut parameters = [(&raw mut copy).cast::<c_void>()];
    // SAFETY: a live function and stream; one parameter, of the kernel's type; it is copied by the
    // call. What it points to was checked by the caller.
    let code = unsafe {
        sys::cuLaunchKernel(
            kernel.raw,
            grid.x,
            grid.y,
            grid.z,
            grid.threads,
            1,
            1,
            kernel.dynamic_bytes,
            stream.raw(),
            parameters.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    };
    check(name, code)
}
