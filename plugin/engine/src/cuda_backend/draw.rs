//! From logits to tokens: on the device where its sampler suffices, else by the CPU's.

use rootstock::StepError;
use rootstock::scheduler::{RowOut, StepOutput};
use rootstock_kernels::cuda::{CudaError, SampleRow, Stream};

use super::slot::{Slot, grow, grow_pinned};
use super::{CudaBackend, Flight, failed};
use crate::cpu_backend::sampling;

/// The largest logit: what the device draws for a row that the host draws anyway.
const GREEDY: SampleRow = SampleRow {
    temperature: 0.0,
    top_p: 1.0,
    min_p: 0.0,
    top_k: 0,
    output_index: 0,
    unused: 0,
    seed: 0,
};

impl CudaBackend {
    /// Queues the way there of what a step draws with.
    pub(super) fn prepare_draws(&mut self, slot: &mut Slot) -> Result<(), CudaError> {
        let count = slot.batch.picks() as usize;
        let device = self.stream.device().clone();
        if let Some(masks) = &self.masks {
            // A grammar is asked when the row is drawn: only the host can.
            for pick in &mut slot.picks {
                if masks.applies(pick.request) {
                    pick.device = None;
                }
            }
        }
        grow_pinned(&mut slot.rows, &device, count)?;
        grow(&mut slot.rows_there, count, "draws")?;
        grow(&mut slot.drawn, count, "draws")?;
        grow_pinned(&mut slot.drawn_here, &device, count)?;
        let rows = slot.rows.as_mut_slice().get_mut(..count);
        let rows = rows.unwrap_or_default();
        rows.fill(GREEDY);
        for (row, pick) in rows.iter_mut().zip(&slot.picks) {
            *row = pick.device.unwrap_or(GREEDY);
        }
        self.stream
            .upload(&slot.rows, 0..count, &slot.rows_there, 0)
    }

    /// Queues the draws.
    pub(super) fn draw(&self, stream: &Stream, slot: &mut Slot) -> Result<(), CudaError> {
        let rows = (&slot.rows_there, slot.batch.picks());
        let vocab = self.caps.vocab;
        self.general
            .sample(stream, &slot.logits, vocab, rows, &mut slot.drawn)
    }

    /// Queues the way home of what the host needs.
    pub(super) fn fetch_draws(&self, slot: &mut Slot) -> Result<(), CudaError> {
        let (count, vocab) = (slot.picks.len(), self.caps.vocab as usize);
        let stream = &self.stream;
        stream.download(&slot.drawn, 0..count, &mut slot.drawn_here, 0)?;
        if slot.picks.iter().any(|pick| pick.device.is_none()) {
            grow_pinned(&mut slot.host_logits, stream.device(), count * vocab)?;
            for (at, pick) in slot.picks.iter().enumerate() {
                if pick.device.is_none() {
                    let range = at * vocab..(at + 1) * vocab;
                    let from = range.start;
                    stream.download(&slot.logits, range, &mut slot.host_logits, from)?;
                }
            }
        }
        Ok(())
    }

    /// Waits for a flight and makes its output, once.
    pub(super) fn settle(&mut self, at: usize) {
        let Some(mut flight) = self.flights.remove(at) else {
            return;
        };
        if flight.output.is_none() {
            let output = self.output(&mut flight);
            flight.output = Some(output);
        }
        self.flights.insert(at, flight);
    }

    fn output(&mut self, flight: &mut Flight) -> Result<StepOutput, StepError> {
        let step = flight.plan.id;
        let lost = |error: CudaError| failed(step, &error);
        flight.slot.done.synchronize().map_err(lost)?;
        let standing = &flight.slot.standing;
        if standing.iter().any(|copy| self.copies.has_failed(*copy)) {
            return Err(StepError::Failed {
                step,
                message: "a copy of its prefix from the host tier failed".into(),
            });
        }
        let mut output = StepOutput {
            rows: vec![RowOut::default(); flight.plan.rows.len()],
        };
        let vocab = self.caps.vocab as usize;
        let nothing = || StepError::Failed {
            step,
            message: format!("no token of {vocab} can be drawn").into(),
        };
        let slot = &mut flight.slot;
        for (at, pick) in slot.picks.iter().enumerate() {
            let spec = flight.plan.rows.get(pick.row);
            let spec = spec.and_then(|row| row.sample.as_ref());
            let (Some(spec), Some(out)) = (spec, output.rows.get_mut(pick.row)) else {
                continue;
            };
            let index = spec.output_index;
            if pick.device.is_some() {
                let token = slot.drawn_here.as_slice().get(at).copied();
                let token = token.filter(|token| *token != SampleRow::NOTHING);
                out.accepted.push(token.ok_or_else(nothing)?);
            } else {
                let masks = self.masks.as_deref();
                let mask = masks.and_then(|masks| masks.allowed(pick.request, index));
                let logits = slot.host_logits.as_mut_slice();
                let logits = logits.get_mut(at * vocab..(at + 1) * vocab);
                let logits = logits.ok_or_else(nothing)?;
                *out = sampling::draw(spec, logits, mask.as_deref(), &mut self.sampler).map_err(
                    |error| StepError::Failed {
                        step,
                        message: error.to_string().into(),
                    },
                )?;
            }
            if let (Some(masks), Some(token)) = (&self.masks, out.accepted.last()) {
                masks.drawn(pick.request, index, *token);
            }
        }
        Ok(output)
    }
}
