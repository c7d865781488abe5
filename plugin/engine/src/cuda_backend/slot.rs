//! What one step in flight has for itself: its arrays, its logits and its draws.

use super::graphs::Graphs;
use rootstock::memory::CopyId;
use rootstock::scheduler::{RequestId, SampleSpec};
use rootstock_kernels::cuda::{
    Batch, CudaError, Device, DeviceBuffer, Event, Numerics, PinnedBuffer, SampleRow,
};

/// A row that draws.
#[derive(Debug)]
pub(super) struct Pick {
    /// Row of the plan.
    pub(super) row: usize,
    /// Whose.
    pub(super) request: RequestId,
    /// What the device draws with; None: the host draws.
    pub(super) device: Option<SampleRow>,
}

impl Pick {
    /// A draw as the plan asks for it. A grammar is looked at later.
    pub(super) fn new(row: usize, request: RequestId, spec: &SampleSpec) -> Self {
        let params = &spec.params;
        let plain = spec
            .suppress
            .as_ref()
            .is_none_or(|tokens| tokens.is_empty())
            && spec.history.is_none()
            && params.logit_bias.is_empty()
            && params.logprobs.is_none()
            && params.temperature >= 0.0
            && params.temperature.is_finite()
            && params.top_p > 0.0
            && params.top_p <= 1.0
            && (0.0..=1.0).contains(&params.min_p);
        let device = plain.then_some(SampleRow {
            temperature: params.temperature,
            top_p: params.top_p,
            min_p: params.min_p,
            top_k: params.top_k,
            output_index: spec.output_index,
            unused: 0,
            seed: params.seed,
        });
        Self {
            row,
            request,
            device,
        }
    }
}

/// Buffers of a step, reused when it is over; they grow to the largest step seen.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) batch: Batch,
    pub(super) picks: Vec<Pick>,
    /// Copies of which each layer comes before that layer of the step.
    pub(super) standing: Vec<CopyId>,
    /// `[picks][vocab]`.
    pub(super) logits: DeviceBuffer<f32>,
    /// The same, of picks that the host draws.
    pub(super) host_logits: PinnedBuffer<f32>,
    pub(super) rows: PinnedBuffer<SampleRow>,
    pub(super) rows_there: DeviceBuffer<SampleRow>,
    /// `[picks]`.
    pub(super) drawn: DeviceBuffer<u32>,
    pub(super) drawn_here: PinnedBuffer<u32>,
    /// Behind all work of the step.
    pub(super) done: Event,
    /// Of decode steps over these buffers.
    pub(super) graphs: Graphs,
}

impl Slot {
    pub(super) fn new(device: &Device, numerics: Numerics, graphs: u32) -> Result<Self, CudaError> {
        Ok(Self {
            graphs: Graphs::new(graphs),
            batch: Batch::new(device, numerics)?,
            picks: Vec::new(),
            standing: Vec::new(),
            logits: DeviceBuffer::new(device, 0, "logits")?,
            host_logits: PinnedBuffer::new(device, 0)?,
            rows: PinnedBuffer::new(device, 0)?,
            rows_there: DeviceBuffer::new(device, 0, "draws")?,
            drawn: DeviceBuffer::new(device, 0, "draws")?,
            drawn_here: PinnedBuffer::new(device, 0)?,
            done: Event::new(device)?,
        })
    }

    /// Where the buffers are that kernels of a step are given.
    pub(super) fn places(&self) -> [u64; 3] {
        [
            self.logits.place(),
            self.rows_there.place(),
            self.drawn.place(),
        ]
    }

    /// The pick of a row of the plan.
    pub(super) fn pick_of(&self, row: u32) -> Option<u32> {
        let at = self
            .picks
            .iter()
            .position(|pick| pick.row == row as usize)?;
        u32::try_from(at).ok()
    }

    pub(super) fn on_device(&self, pick: u32) -> bool {
        let pick = self.picks.get(pick as usize);
        pick.is_some_and(|pick| pick.device.is_some())
    }
}

/// A device buffer of at least `len` elements.
pub(super) fn grow<T: bytemuck::Pod>(
    buffer: &mut DeviceBuffer<T>,
    len: usize,
    what: &'static str,
) -> Result<(), CudaError> {
    if buffer.len() < len {
        *buffer = DeviceBuffer::new(&buffer.device().clone(), len.next_power_of_two(), what)?;
    }
    Ok(())
}

/// A page-locked buffer of at least `len` elements.
pub(super) fn grow_pinned<T: bytemuck::Pod>(
    buffer: &mut PinnedBuffer<T>,
    device: &Device,
    len: usize,
) -> Result<(), CudaError> {
    if buffer.len() < len {
        *buffer = PinnedBuffer::new(device, len.next_power_of_two())?;
    }
    Ok(())
}
