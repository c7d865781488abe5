//! Copies of pages between a device and the host tier, on streams of their own beside the steps.
//!
//! The host tier is the arena that all replicas and the storage tier share; its memory is
//! registered with the driver, so copies need no staging. A page is one contiguous copy. Demotions
//! wait for the steps launched before them, because those may still write a page that leaves;
//! promotions wait for nobody, because a page in transit has no other user.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use rootstock_memory::{CopyDone, CopyEngine, CopyId, CopyPlan, Full, KvArena, PageId, TierId};

use super::device::Device;
use super::error::{CudaError, check};
use super::pages::{DevicePages, PageShape};
use super::stream::{Event, Stream};

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

/// A plan under way; failed ones have no event to wait for.
#[derive(Debug)]
struct UnderWay {
    id: CopyId,
    event: Result<Event, CudaError>,
}

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

    /// Queues the copies of a plan; the event is behind them.
    fn start(&self, plan: &CopyPlan) -> Result<Event, CudaError> {
        let refuse = |name: &str| CudaError::Call {
            call: "copy plan",
            name: name.into(),
            fatal: false,
        };
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
        let stream = if down { &self.down } else { &self.up };
        if down {
            stream.wait_for(&self.steps)?;
        }
        let (page_bytes, layer_bytes) = (self.shape.page_bytes(), self.shape.layer_bytes());
        let (offset, len) = (layers.start * layer_bytes, layers.len() * layer_bytes);
        for (there, here) in on_device.iter().zip(on_host) {
            let there = self.pages + (there.index() * page_bytes + offset) as u64;
            self.copy(
                down,
                there,
                host.address(*here, page_bytes, offset, len),
                len,
            )?;
        }
        let event = Event::new(&self.device)?;
        event.record(stream)?;
        Ok(event)
    }
}

impl CopyEngine for CudaCopies {
    fn submit(&mut self, plan: CopyPlan) -> Result<(), (CopyPlan, Full)> {
        if self.waiting.len() >= self.limit {
            return Err((plan, Full));
        }
        let event = self.start(&plan);
        self.waiting.push_back(UnderWay { id: plan.id, event });
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<CopyDone>) {
        self.waiting.retain(|copy| {
            let passed = match &copy.event {
                Ok(event) => event.passed(),
                Err(_) => Ok(true),
            };
            if matches!(passed, Ok(false)) {
                return true;
            }
            let ok = passed.is_ok() && copy.event.is_ok();
            if !ok {
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
