//! The CUDA backend: devices, memory and kernels, found and compiled at run time.
//!
//! Nothing of CUDA is needed to build this, or to start: the driver library is looked for when a
//! device is opened ([`Device::open`]), and every reason why there is none is a
//! [`CudaError::NoDevice`]. The kernels (`kernels/cuda/*.cu`) are embedded as source, compiled by
//! NVRTC for the device at hand and cached on disk; without NVRTC their prebuilt form is loaded.
//!
//! | file | what |
//! |---|---|
//! | `device`, `buffer`, `stream` | the driver: contexts, memory, order of work |
//! | `module`, `launch`, `args` | compiled code and how it is called |
//! | `graph` | launches captured once and started by one call |
//! | `pages`, `batch` | the pool of pages, and the tokens of a step |
//! | `attention`, `general`, `product` | one checked function a kernel |
//! | `blocks` | quantized weights as a file has them |
//! | `library` | cuBLASLt, for products with many tokens |
//! | `copies` | pages to and from the host tier, beside the steps |
//! | `measure` | how fast all of it is on the device at hand |
//!
//! All offsets are 64 bits wide. [`Numerics::Invariant`] gives every token one order of summation,
//! whatever shares its step; [`Numerics::Fast`] uses tensor cores for prompts and splits that fill
//! the device.

mod args;
mod attention;
mod batch;
mod blocks;
mod buffer;
mod copies;
mod device;
mod error;
mod general;
mod graph;
mod launch;
mod library;
mod measure;
mod module;
mod pages;
mod product;
mod stream;
mod strides;

pub use attention::{AttentionCall, AttentionKernels, RopeAngles, StoreCall};
pub use batch::{Batch, BatchRows, BatchShape, Numerics};
pub use buffer::{DeviceBuffer, PinnedBuffer};
pub use copies::{CudaCopies, PinnedArena};
pub use device::{Device, DeviceMemory};
pub use error::CudaError;
pub use general::{GeneralKernels, NormCall, PagePart, SampleRow};
pub use graph::Graph;
pub use library::ProductLibrary;
pub use measure::{Figure, MeasureSizes, Measured, measure};
pub use module::CodeOrigin;
pub use pages::{DevicePages, KvFormat, PageShape};
pub use product::{DeviceMatrix, ProductCall, WeightType};
pub use stream::{Event, Stream};
