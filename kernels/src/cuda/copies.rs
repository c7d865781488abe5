//! Copies of pages between a device and the host tier, on streams of their own beside the steps.
//!
//! The host tier is the arena that all replicas and the storage tier share; its memory is
//! registered with the driver, so copies need no staging. Demotions copy a page at a time, and wait
//! for the steps launched before them, because those may still write a page that leaves. Promotions
//! wait for nobody, because a page in transit has no other user; they go layer by layer, the pages
//! of a layer in as few strided copies as their places allow (`strides`), with an event behind each
//! layer, so that a step can begin with the first layer while the others are on their way.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use rootstock_memory::{CopyDone, CopyEngine, CopyId, CopyPlan, Full, KvArena, PageId, TierId};

use super::device::Device;
use super::error::{CudaError, check};
use super::pages::{DevicePages, PageShape};
use super::stream::{Event, Stream};
use super::strides::{Run, runs};

/// The host tier's arena, page-locked for as long as this value lives.
#[derive(Debug)]
pub struct PinnedArena {
    device: Device,
    arena: Arc<Mutex<KvArena>>,
    /// Address of the scratch page. The arena never moves its memory.
    at: usize,
    bytes: usize,
    total: u32,
}

impl PinnedArena {
    /// Page-locks the whole arena for all devices.
    ///
    /// # Errors
    /// The system does not lock that much memory.
    pub fn new(device: &Device, arena: Arc<Mutex<KvArena>>) -> Result<Self, CudaError> {
        device.bind()?;
        let (at, bytes, total) = {
            let mut arena = arena.lock().unwrap_or_else(PoisonError::into_inner);
            let total = arena.total();
            let bytes = arena.bytes_mut();
            (bytes.as_mut_ptr() as usize, bytes.len(), total)
        };
        // SAFETY: memory of a live arena, which is kept alive and unregistered by `Drop`.
        check("cuMemHostRegister", unsafe {
            sys::cuMemHostRegister_v2(at as *mut _, bytes, sys::CU_MEMHOSTREGISTER_PORTABLE)
        })?;
        Ok(Self {
            device: device.clone(),
            arena,
            at,
            bytes,
            total,
        })
    }

    /// The arena.
    pub fn arena(&self) -> &Arc<Mutex<KvArena>> {
        &self.arena
    }

    /// Address of `len` bytes at `offset` of a page.
    fn address(&self, page: PageId, page_bytes: usize, offset: usize, len: usize) -> usize {
        let from = page.index() * page_bytes + offset;
        assert!(
            from + len <= self.bytes,
            "page {} of the host tier",
            page.get()
        );
        self.at + from
    }
}

impl Drop for PinnedArena {
    fn drop(&mut self) {
        // Copies under way use it.
        if self.device.synchronize().is_ok() {
            // SAFETY: registered in `new`, unregistered once, and the device is idle.
            let _code = unsafe { sys::cuMemHostUnregister(self.at as *mut _) };
        }
    }
}

/// A plan under way; failed ones have no events to wait for.
#[derive(Debug)]
struct UnderWay {
    id: CopyId,
    events: Result<Events, CudaError>,
}

/// Behind each so many layers of a plan, the last one behind all of it.
#[derive(Debug)]
struct Events {
    all: Vec<Event>,
    first_layer: usize,
    layers_each: usize,
}

impl Events {
    fn passed(&self) -> Result<bool, CudaError> {
        self.all.last().map_or(Ok(true), Event::passed)
    }

    /// Behind this layer.
    fn behind(&self, layer: usize) -> Option<&Event> {
        let at = layer.checked_sub(self.first_layer)? / self.layers_each;
        self.all.get(at.min(self.all.len().saturating_sub(1)))
    }
}

/// Calls of the driver that one promotion may take: with more, several layers go together.
const CALLS_MAX: usize = 1024;

/// Failed plans that are remembered for the steps that stand on them.
const FAILED_MAX: usize = 256;

/// Copies of a page that are timed together.
const MEASURED_COPIES: u64 = 16;

/// The copy engine of a CUDA replica.
#[derive(Debug)]
pub struct CudaCopies {
    device: Device,
    pages: u64,
    shape: PageShape,
    total: u32,
    host: Option<Arc<PinnedArena>>,
    down: Stream,
    up: Stream,
    /// Behind the last step that was launched.
    steps: Event,
    waiting: VecDeque<UnderWay>,
    failed: VecDeque<CopyId>,
    limit: usize,
}

impl CudaCopies {
    /// An engine for `pool`, which must live as long; without a host tier every copy fails.
    /// `limit` plans may wait.
    ///
    /// # Errors
    /// The driver refuses streams or events.
    pub fn new(
        device: &Device,
        pool: &DevicePages,
        host: Option<Arc<PinnedArena>>,
        limit: usize,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            device: device.clone(),
            pages: pool.bytes().address(),
            shape: *pool.shape(),
            total: pool.total(),
            host,
            down: Stream::new(device)?,
            up: Stream::new(device)?,
            steps: Event::new(device)?,
            waiting: VecDeque::new(),
            failed: VecDeque::new(),
            limit: limit.max(1),
        })
    }

    /// Says that a step was launched on `stream`.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn step_launched(&self, stream: &Stream) -> Result<(), CudaError> {
        self.steps.record(stream)
    }

    /// Later work of `stream` begins when a plan has brought this layer: at once where it has ended
    /// well.
    ///
    /// # Errors
    /// It failed, or the driver refuses.
    pub fn wait_for_layer(&self, stream: &Stream, id: CopyId, layer: u32) -> Result<(), CudaError> {
        let under_way = self.waiting.iter().find(|copy| copy.id == id);
        let events = match under_way.map(|copy| &copy.events) {
            Some(Ok(events)) => events,
            Some(Err(error)) => return Err(refuse(&error.to_string())),
            None if self.has_failed(id) => return Err(refuse("it failed")),
            None => return Ok(()),
        };
        match events.behind(layer as usize) {
            Some(event) => stream.wait_for(event),
            None => Ok(()),
        }
    }

    /// Whether a plan failed.
    #[must_use]
    pub fn has_failed(&self, id: CopyId) -> bool {
        let under_way = self
            .waiting
            .iter()
            .any(|it| it.id == id && it.events.is_err());
        under_way || self.failed.contains(&id)
    }

    /// Nanoseconds that a page takes between device and host, the slower way of the two, by the
    /// device's clock; None without a host tier. Only the scratch pages are copied. To be asked
    /// before steps and copies begin, because those would share the link.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn measure_page_ns(&self) -> Result<Option<u64>, CudaError> {
        Ok(self.measure_way_ns(true)?.max(self.measure_way_ns(false)?))
    }

    /// The same, for one way.
    pub(super) fn measure_way_ns(&self, down: bool) -> Result<Option<u64>, CudaError> {
        if self.host.is_none() {
            return Ok(None);
        }
        let stream = if down { &self.down } else { &self.up };
        // The first round wakes the link up.
        let mut best = u64::MAX;
        for _round in 0..4 {
            let (start, end) = (Event::timed(&self.device)?, Event::timed(&self.device)?);
            start.record(stream)?;
            self.copy_scratch(down, MEASURED_COPIES)?;
            end.record(stream)?;
            end.synchronize()?;
            best = best.min(end.nanoseconds_since(&start)? / MEASURED_COPIES);
        }
        Ok(Some(best.max(1)))
    }

    /// Queues `count` copies of the scratch page to the host that begin where `stream` is; the
    /// event is behind them.
    pub(super) fn begin_beside(&self, stream: &Stream, count: u64) -> Result<Event, CudaError> {
        let (start, end) = (Event::new(&self.device)?, Event::new(&self.device)?);
        start.record(stream)?;
        self.down.wait_for(&start)?;
        self.copy_scratch(true, count)?;
        end.record(&self.down)?;
        Ok(end)
    }

    /// The same, and `stream` waits for them.
    pub(super) fn beside(&self, stream: &Stream, count: u64) -> Result<(), CudaError> {
        stream.wait_for(&self.begin_beside(stream, count)?)
    }

    fn copy_scratch(&self, down: bool, count: u64) -> Result<(), CudaError> {
        let Some(host) = &self.host else {
            return Ok(());
        };
        let len = self.shape.page_bytes();
        let here = host.address(PageId::new(0), len, 0, len);
        for _copy in 0..count {
            self.copy(down, self.pages, here, len)?;
        }
        Ok(())
    }

    /// Queues one copy between `there` on the device and `here` on the host.
    fn copy(&self, down: bool, there: u64, here: usize, len: usize) -> Result<(), CudaError> {
        self.device.bind()?;
        let code = if down {
            let raw = self.down.raw();
            // SAFETY: checked bytes of a live pool and of a registered arena; both outlive the
            // copy, and the core keeps others away from a page in transit.
            unsafe { sys::cuMemcpyDtoHAsync_v2(here as *mut _, there, len, raw) }
        } else {
            let raw = self.up.raw();
            // SAFETY: as above.
            unsafe { sys::cuMemcpyHtoDAsync_v2(there, here as *const _, len, raw) }
        };
        check("copy of a page", code)
    }

    /// Queues copies up of `len` bytes at `offset` of the pages of a run.
    fn copy_run(
        &self,
        host: &PinnedArena,
        run: &Run,
        offset: usize,
        len: usize,
    ) -> Result<(), CudaError> {
        let page_bytes = self.shape.page_bytes();
        let there = self.pages + (run.there.index() * page_bytes + offset) as u64;
        let here = host.address(run.here, page_bytes, offset, len);
        if run.count == 1 {
            return self.copy(false, there, here, len);
        }
        let memory = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            srcHost: here as *const _,
            srcDevice: 0,
            srcArray: std::ptr::null_mut(),
            srcPitch: run.here_step * page_bytes,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: there,
            dstArray: std::ptr::null_mut(),
            dstPitch: run.there_step * page_bytes,
            WidthInBytes: len,
            Height: run.count,
        };
        self.device.bind()?;
        // SAFETY: checked bytes of each page of the run, of a live pool and of a registered arena;
        // both outlive the copy, and the core keeps others away from a page in transit.
        check("copy of a layer", unsafe {
            sys::cuMemcpy2DAsync_v2(&raw const memory, self.up.raw())
        })
    }

    /// Queues a promotion, some layers after the others.
    fn start_up(
        &self,
        host: &PinnedArena,
        runs: &[Run],
        layers: std::ops::Range<usize>,
    ) -> Result<Events, CudaError> {
        let layer_bytes = self.shape.layer_bytes();
        let layers_each = (runs.len() * layers.len()).div_ceil(CALLS_MAX).max(1);
        let mut all = Vec::new();
        for begin in layers.clone().step_by(layers_each) {
            let count = layers_each.min(layers.end - begin);
            for run in runs {
                self.copy_run(host, run, begin * layer_bytes, count * layer_bytes)?;
            }
            let event = Event::new(&self.device)?;
            event.record(&self.up)?;
            all.push(event);
        }
        Ok(Events {
            all,
            first_layer: layers.start,
            layers_each,
        })
    }

    /// Queues the copies of a plan, with events behind them.
    fn start(&self, plan: &CopyPlan) -> Result<Events, CudaError> {
        let Some(host) = &self.host else {
            return Err(refuse("there is no host tier"));
        };
        let down = match (plan.from.0, plan.to.0) {
            (TierId::Device(_), TierId::Host) => true,
            (TierId::Host, TierId::Device(_)) => false,
            _ => return Err(refuse("not between device and host")),
        };
        let (on_device, on_host) = if down {
            (&plan.from.1, &plan.to.1)
        } else {
            (&plan.to.1, &plan.from.1)
        };
        let inside = |pages: &[PageId], total: u32| {
            pages.iter().all(|page| (1..=total).contains(&page.get()))
        };
        let layers = usize::from(plan.layers.start)..usize::from(plan.layers.end);
        if on_device.len() != on_host.len()
            || !inside(on_device, self.total)
            || !inside(on_host, host.total)
            || layers.is_empty()
            || layers.end > self.shape.layout().layers() as usize
        {
            return Err(refuse("pages or layers that are not there"));
        }
        let (page_bytes, layer_bytes) = (self.shape.page_bytes(), self.shape.layer_bytes());
        if !down {
            return self.start_up(host, &runs(on_device, on_host, page_bytes), layers);
        }
        self.down.wait_for(&self.steps)?;
        let (offset, len) = (layers.start * layer_bytes, layers.len() * layer_bytes);
        for (there, here) in on_device.iter().zip(on_host) {
            let there = self.pages + (there.index() * page_bytes + offset) as u64;
            self.copy(
                true,
                there,
                host.address(*here, page_bytes, offset, len),
                len,
            )?;
        }
        let event = Event::new(&self.device)?;
        event.record(&self.down)?;
        Ok(Events {
            all: vec![event],
            first_layer: layers.start,
            layers_each: layers.len(),
        })
    }
}

fn refuse(name: &str) -> CudaError {
    CudaError::Call {
        call: "copy plan",
        name: name.into(),
        fatal: false,
    }
}

impl CopyEngine for CudaCopies {
    fn submit(&mut self, plan: CopyPlan) -> Result<(), (CopyPlan, Full)> {
        if self.waiting.len() >= self.limit {
            return Err((plan, Full));
        }
        let events = self.start(&plan);
        self.waiting.push_back(UnderWay {
            id: plan.id,
            events,
        });
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<CopyDone>) {
        self.waiting.retain(|copy| {
            let passed = match &copy.events {
                Ok(events) => events.passed(),
                Err(_) => Ok(true),
            };
            if matches!(passed, Ok(false)) {
                return true;
            }
            let ok = passed.is_ok() && copy.events.is_ok();
            if !ok {
                if self.failed.len() >= FAILED_MAX {
                    self.failed.pop_front();
                }
                self.failed.push_back(copy.id);
                // What was queued before the failure must be over before others use the pages. A
                // device that cannot even say so is lost, and nobody uses them.
                let _over = self.down.synchronize().and_then(|()| self.up.synchronize());
            }
            done.push(CopyDone { id: copy.id, ok });
            false
        });
    }
}

impl Drop for CudaCopies {
    fn drop(&mut self) {
        // The pool and the arena may go after this.
        let _code = self.device.synchronize();
    }
}
