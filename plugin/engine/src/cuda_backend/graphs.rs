//! Graphs of decode steps, by batch size and longest context.
//!
//! A step whose rows all have one token is padded to one of a few sizes, so that few graphs serve
//! all of them. A size that comes up again is captured; later steps of it are one launch. A graph
//! holds for the buffers it was captured over: where one was replaced, the graph goes. Graphs are
//! bounded in number and in bytes, and the one that was not used longest makes room. A capture that
//! fails costs nothing but itself: the step is launched kernel by kernel, and the next try waits
//! twice as long.

use std::collections::BTreeMap;

use rootstock_kernels::cuda::{BatchShape, CudaError, Graph, Stream};

use super::CudaBackend;
use super::slot::Slot;

/// Batch sizes of graphs.
const SIZES: [u32; 14] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256];

/// Device memory that the graphs of one step in flight may take: of what is left free beside the
/// pages.
pub(super) const BYTES_MAX: u64 = 128 << 20;

/// Steps of a kind before it is captured: the first one loads its kernels and grows the buffers.
const SEEN_LEAST: u32 = 2;

/// Steps of a kind between two tries at most.
const SEEN_MOST: u32 = 1 << 12;

/// Kinds of steps that are known at a time.
const KINDS_MAX: usize = 1024;

/// The size of graph for a step of this many rows; None: too many.
pub(super) fn size_for(rows: usize) -> Option<u32> {
    SIZES.into_iter().find(|size| rows <= *size as usize)
}

/// A kind of step: batch size and longest context.
type Kind = (u32, u32);

#[derive(Debug)]
struct Known {
    /// Since the last try.
    seen: u32,
    /// Steps after which it is tried.
    wanted: u32,
    used: u64,
    graph: Option<Captured>,
}

#[derive(Debug)]
struct Captured {
    graph: Graph,
    places: Vec<u64>,
}

/// What to do with a step.
enum Way<'a> {
    Launch(&'a Graph),
    Capture,
    Plain,
}

/// The graphs over the buffers of one step in flight.
#[derive(Debug)]
pub(super) struct Graphs {
    max: usize,
    known: BTreeMap<Kind, Known>,
    clock: u64,
}

impl Graphs {
    /// Room for `max` graphs; 0: none are captured.
    pub(super) fn new(max: u32) -> Self {
        Self {
            max: max as usize,
            known: BTreeMap::new(),
            clock: 0,
        }
    }

    pub(super) fn enabled(&self) -> bool {
        self.max > 0
    }

    /// How a step of this kind over buffers at these places is launched.
    fn way(&mut self, kind: Kind, places: &[u64]) -> Way<'_> {
        self.clock += 1;
        if self.known.len() >= KINDS_MAX && !self.known.contains_key(&kind) {
            self.forget_oldest(|_| true);
        }
        let known = self.known.entry(kind).or_insert(Known {
            seen: 0,
            wanted: SEEN_LEAST,
            used: 0,
            graph: None,
        });
        known.used = self.clock;
        known.seen = known.seen.saturating_add(1);
        if known.graph.as_ref().is_some_and(|it| it.places != places) {
            known.graph = None;
            known.seen = 1;
        }
        match &known.graph {
            Some(captured) => Way::Launch(&captured.graph),
            None if known.seen >= known.wanted => Way::Capture,
            None => Way::Plain,
        }
    }

    /// Keeps a graph. Others make room for it; one that is larger than all may be is not kept.
    fn keep(&mut self, kind: Kind, graph: Graph, places: Vec<u64>) -> Option<&Graph> {
        if graph.bytes() > BYTES_MAX {
            self.failed(kind);
            return None;
        }
        while self.count() >= self.max || self.bytes() + graph.bytes() > BYTES_MAX {
            if !self.forget_oldest(|known| known.graph.is_some()) {
                break;
            }
        }
        let known = self.known.get_mut(&kind)?;
        known.graph = Some(Captured { graph, places });
        known.graph.as_ref().map(|captured| &captured.graph)
    }

    /// The next try of this kind waits twice as long.
    fn failed(&mut self, kind: Kind) {
        if let Some(known) = self.known.get_mut(&kind) {
            known.seen = 0;
            known.wanted = (known.wanted * 2).min(SEEN_MOST);
        }
    }

    fn forget_oldest(&mut self, which: impl Fn(&Known) -> bool) -> bool {
        let known = self.known.iter().filter(|(_, known)| which(known));
        let oldest = known
            .min_by_key(|(_, known)| known.used)
            .map(|(kind, _)| *kind);
        oldest.is_some_and(|kind| self.known.remove(&kind).is_some())
    }

    /// Graphs held.
    pub(super) fn count(&self) -> usize {
        self.known
            .values()
            .filter(|known| known.graph.is_some())
            .count()
    }

    /// Bytes of device memory that they take.
    pub(super) fn bytes(&self) -> u64 {
        let graphs = self.known.values().filter_map(|known| known.graph.as_ref());
        graphs.map(|captured| captured.graph.bytes()).sum()
    }
}

impl CudaBackend {
    /// Queues the kernels of a step, from its tokens to its draws: by a graph where the batch is
    /// padded and there is one, else one by one.
    pub(super) fn compute(&mut self, slot: &mut Slot, padded: bool) -> Result<(), CudaError> {
        let stream = std::sync::Arc::clone(&self.stream);
        if !padded {
            return self.queue(&stream, slot);
        }
        let BatchShape { n, longest, place } = slot.batch.shape();
        let kind = (n, longest);
        let mut places = vec![place];
        places.extend(slot.places());
        places.extend(self.work.places());
        places.extend(self.library.iter().flat_map(|library| library.places()));
        match slot.graphs.way(kind, &places) {
            Way::Launch(graph) => return graph.launch(&stream),
            Way::Plain => {}
            Way::Capture => {
                let device = stream.device().clone();
                match Graph::capture(&device, |stream| self.queue(stream, slot)) {
                    Ok(graph) => {
                        tracing::debug!(rows = n, longest, bytes = graph.bytes(), "a CUDA graph");
                        if let Some(graph) = slot.graphs.keep(kind, graph, places) {
                            return graph.launch(&stream);
                        }
                    }
                    Err(error) if error.is_fatal() => return Err(error),
                    Err(error) => {
                        tracing::warn!(%error, rows = n, longest, "no CUDA graph of this step");
                        slot.graphs.failed(kind);
                    }
                }
            }
        }
        self.queue(&stream, slot)
    }

    fn queue(&mut self, stream: &Stream, slot: &mut Slot) -> Result<(), CudaError> {
        self.layers(stream, slot)?;
        if slot.batch.picks() > 0 {
            self.pick_logits(stream, slot)?;
            self.draw(stream, slot)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_the_smallest_size_that_holds_it() {
        assert_eq!(size_for(1), Some(1));
        assert_eq!(size_for(3), Some(4));
        assert_eq!(size_for(33), Some(48));
        assert_eq!(size_for(256), Some(256));
        assert_eq!(size_for(257), None);
    }

    #[test]
    fn a_kind_is_captured_when_it_comes_again_and_tried_less_often_after_a_failure() {
        let mut graphs = Graphs::new(4);
        let mut captures = |steps: u32| {
            (0..steps)
                .filter(|_| {
                    let capture = matches!(graphs.way((8, 512), &[1]), Way::Capture);
                    if capture {
                        graphs.failed((8, 512));
                    }
                    capture
                })
                .count()
        };
        assert_eq!(captures(1), 0);
        assert_eq!(captures(1), 1);
        assert_eq!(captures(3), 0);
        assert_eq!(captures(1), 1);
        assert_eq!(captures(7), 0);
        assert_eq!(captures(1), 1);
    }

    #[test]
    fn kinds_that_are_known_are_bounded() {
        let mut graphs = Graphs::new(4);
        for longest in 0..5000 {
            graphs.way((1, longest), &[]);
        }
        assert_eq!(graphs.known.len(), KINDS_MAX);
        assert!(graphs.known.contains_key(&(1, 4999)) && !graphs.known.contains_key(&(1, 0)));
    }
}
