//! Starting a service on CUDA devices, one a replica, over one host tier that all of them copy from
//! and to.

use std::sync::Arc;

use rootstock::Backend;
use rootstock_kernels::cuda::{CudaError, Device, KvFormat, Numerics, PinnedArena};

use super::config::{DeviceChoice, EightBits};
use super::memory;
use super::start::{HostTier, ModelIdentity};
use super::{Service, ServiceConfig};
use crate::cuda_backend::{self, CudaBackend, CudaBackendConfig};
use crate::error::EngineError;
use crate::gguf::Gguf;

/// Devices that this process sees.
pub(super) fn cuda_devices() -> Result<u32, CudaError> {
    Device::count()
}

/// Says why `replicas` devices from `first` on cannot be used.
pub(super) fn check_cuda(first: u32, replicas: u16) -> Result<(), EngineError> {
    let count = Device::count()?;
    let wanted = first.saturating_add(u32::from(replicas));
    if wanted > count {
        let reason =
            format!("{replicas} from number {first} on were asked for, the driver finds {count}");
        return Err(CudaError::NoDevice {
            reason: reason.into(),
        }
        .into());
    }
    Ok(())
}

/// Loads a model onto the devices from `first` on and serves it.
pub(super) fn start_on_cuda(
    file: &Gguf,
    mut config: ServiceConfig,
    first: u32,
) -> Result<Service, EngineError> {
    let defaults = CudaBackendConfig::default();
    config.max_in_flight.get_or_insert(defaults.max_in_flight);
    let mut models = Vec::new();
    for replica in 0..u32::from(config.replicas()?) {
        models.push(cuda_backend::load(
            file,
            first + replica,
            config.max_model_len,
        )?);
    }
    let Some(model) = models.first() else {
        return Err(super::start::no_backend());
    };
    let sizes = model.config();
    let format = match config.kv_eight_bits {
        None => KvFormat::of(config.kv_dtype),
        Some(EightBits::E4m3) => KvFormat::E4m3,
        Some(EightBits::Int8) => KvFormat::Int8,
    };
    let shape = cuda_backend::page_shape(sizes, config.page_size, format)?;
    let page_bytes = shape.page_bytes() as u64;
    let mut free = u64::MAX;
    for model in &models {
        free = free.min(model.device().memory()?.free_bytes);
    }
    let settings = settings(&config, format);
    let free = free.saturating_sub(cuda_backend::bytes_beside_pages(&settings));
    let config = ServiceConfig {
        device: DeviceChoice::Cuda(first),
        device_pages: Some(device_pages(&config, page_bytes, free)?),
        ..config
    };
    let tiers = config.pages(page_bytes, model.weight_bytes())?;
    let identity = ModelIdentity::of(file, &config, sizes, model.weight_bytes());
    let settings = CudaBackendConfig {
        pages: tiers.device,
        ..settings
    };
    let mut host = HostTier::new(shape.host_layout()?, tiers.host)?;
    let pinned = match &host.arena {
        Some(arena) => Some(Arc::new(PinnedArena::new(
            model.device(),
            Arc::clone(arena),
        )?)),
        None => None,
    };
    let mut backends: Vec<Box<dyn Backend>> = Vec::new();
    for model in models {
        let name = model.device().name().to_owned();
        let backend = CudaBackend::new(model, &settings, pinned.clone())?;
        let copy_page_ns = backend.measure_copies()?;
        let kernels = backend.code_origin();
        tracing::info!(
            device = name,
            ?kernels,
            ?copy_page_ns,
            "a CUDA device computes"
        );
        host.copy_page_ns = host.copy_page_ns.max(copy_page_ns);
        backends.push(Box::new(backend));
    }
    Service::start_over(config.with(tiers), backends, identity, host)
}

/// Settings of each backend, all but the number of pages.
fn settings(config: &ServiceConfig, kv_format: KvFormat) -> CudaBackendConfig {
    CudaBackendConfig {
        page_tokens: config.page_size,
        kv_format,
        max_in_flight: config.in_flight(),
        graphs: config.cuda_graphs,
        library: config.cuda_library,
        numerics: if config.batch_invariant {
            Numerics::Invariant
        } else {
            Numerics::Fast
        },
        ..CudaBackendConfig::default()
    }
}

/// Pages of each device, of which the fullest has `free` bytes beside what graphs and products may
/// take.
fn device_pages(config: &ServiceConfig, page_bytes: u64, free: u64) -> Result<u32, EngineError> {
    let page_bytes = page_bytes.max(1);
    let count = |bytes: u64| u32::try_from(bytes / page_bytes).unwrap_or(u32::MAX - 1);
    let pages = match (config.device_pages, config.kv_cache_mib) {
        (Some(pages), _) => pages,
        (None, Some(mib)) => count(mib.saturating_mul(memory::MIB)),
        (None, None) => count(memory::cuda_default(free)),
    };
    let wanted = (u64::from(pages) + 1) * page_bytes;
    if wanted > free {
        return Err(CudaError::OutOfMemory {
            what: "key-value pages; lower --kv-cache-mib",
            wanted_bytes: wanted,
            free_bytes: free,
        }
        .into());
    }
    Ok(pages)
}
