//! The CUDA backend: the same model mathematics on a device, one step behind the plans.
//!
//! `launch` checks a plan, uploads its arrays and queues every kernel of the step, the draws
//! included; it does not wait. `wait` waits for the step's event and reads the tokens. So with two
//! steps in flight the next one is planned and queued while the device computes, and a row that
//! continues from a step in flight takes its token on the device. Draws that need more than the
//! device's sampler knows (penalties, bias, masks, log probabilities) come to the CPU's.
//!
//! A step that fails leaves no trace but in pages of its own rows. After a fault of the device
//! itself the backend is lost, and says so.

mod draw;
mod forward;
mod graphs;
mod slot;
mod weights;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use rootstock::memory::{CopyEngine, KvDtype, StepId};
use rootstock::radix::Token;
use rootstock::scheduler::{RowInput, StepOutput, StepPlan};
use rootstock::{Backend, Caps, Masks, StepError};
use rootstock_kernels::KvRow;
use rootstock_kernels::SampleScratch;
use rootstock_kernels::cuda::{
    AttentionKernels, BatchRows, CodeOrigin, CudaCopies, CudaError, Device, DevicePages,
    GeneralKernels, Graph, KvFormat, Numerics, PageShape, PinnedArena, ProductLibrary, Stream,
};

use crate::cpu_backend::{CpuBackend, plan_check, sampling};
use crate::error::EngineError;
use crate::gguf::Gguf;
use crate::model::ModelConfig;
use forward::Work;
use slot::{Pick, Slot};
pub use weights::CudaModel;

/// How a backend is set up.
#[derive(Clone, Debug)]
pub struct CudaBackendConfig {
    /// Usable pages of the device.
    pub pages: u32,
    /// Tokens a page: a power of two.
    pub page_tokens: u32,
    /// Element type of K and V.
    pub kv_format: KvFormat,
    /// Steps that may be launched and not yet waited for: 1 or 2.
    pub max_in_flight: u8,
    /// Copies to the host tier that may wait.
    pub copy_queue: usize,
    /// Whether results may depend on what shares a step.
    pub numerics: Numerics,
    /// Graphs of decode steps at most, for each step in flight; 0: kernels are launched one by one.
    pub graphs: u32,
    /// Large products by cuBLASLt, where it is installed and results may depend on their number.
    pub library: bool,
}

impl Default for CudaBackendConfig {
    fn default() -> Self {
        Self {
            pages: 1024,
            page_tokens: 16,
            kv_format: KvFormat::F16,
            max_in_flight: 2,
            copy_queue: 64,
            numerics: Numerics::Fast,
            graphs: 64,
            library: true,
        }
    }
}

/// The folder that keeps compiled kernels.
#[must_use]
pub fn code_cache() -> Option<PathBuf> {
    dirs::cache_dir().map(|folder| folder.join("rootstock").join("cuda"))
}

/// A step between `launch` and `wait`.
#[derive(Debug)]
struct Flight {
    plan: StepPlan,
    slot: Slot,
    /// There already, because a later step needed its tokens.
    output: Option<Result<StepOutput, StepError>>,
}

/// Tokens of a finished step, by row, for rows that continue from it.
#[derive(Debug)]
struct Drawn {
    step: StepId,
    tokens: Vec<Option<Token>>,
}

/// Runs plans on one device. One per replica.
#[derive(Debug)]
pub struct CudaBackend {
    // Before what it copies from and to: it waits for its copies.
    copies: CudaCopies,
    model: CudaModel,
    stream: Arc<Stream>,
    attention: AttentionKernels,
    general: Arc<GeneralKernels>,
    library: Option<ProductLibrary>,
    pages: DevicePages,
    work: Work,
    caps: Caps,
    numerics: Numerics,
    flights: VecDeque<Flight>,
    idle: Vec<Slot>,
    drawn: VecDeque<Drawn>,
    sampler: SampleScratch,
    masks: Option<Arc<dyn Masks>>,
}

/// A row's first token, where it is not in the plan.
enum First {
    Known,
    Token(Token),
    /// Drawn on the device: of the flight and its pick.
    Pick(usize, u32),
    /// It never came: the row is left out.
    Missing,
}

impl CudaBackend {
    /// A backend over a loaded model with its own pages; `host` is the host tier.
    ///
    /// # Errors
    /// A shape the kernels do not compute, no memory, or the driver refuses.
    pub fn new(
        model: CudaModel,
        config: &CudaBackendConfig,
        host: Option<Arc<PinnedArena>>,
    ) -> Result<Self, EngineError> {
        let sizes = model.config();
        let shape = page_shape(sizes, config.page_tokens, config.kv_format)?;
        let device = model.device().clone();
        let stream = Arc::new(Stream::new(&device)?);
        let library = library(&device, config)?;
        let mut pages = DevicePages::new(&device, shape, config.pages)?;
        // Fresh memory may hold numbers that are none, which masks do not hide in a product.
        stream.clear(pages.bytes_mut())?;
        // Copies have streams of their own.
        stream.synchronize()?;
        let attention = AttentionKernels::load(&device, &shape, model.code_cache())?;
        let copies = CudaCopies::new(&device, &pages, host, config.copy_queue)?;
        let max_in_flight = config.max_in_flight.clamp(1, 2);
        let graphs = match Graph::missing_call(&device) {
            Some(call) if config.graphs > 0 => {
                tracing::warn!(
                    call,
                    "the driver has no CUDA graphs: kernels are launched one by one"
                );
                0
            }
            _ => config.graphs,
        };
        let mut idle = Vec::new();
        for _slot in 0..max_in_flight {
            idle.push(Slot::new(&device, config.numerics, graphs)?);
        }
        let caps = Caps {
            layout: shape.host_layout()?,
            numerics_id: numerics_id(&device, config, library.as_ref()),
            max_in_flight,
            vocab: sizes.vocab,
        };
        Ok(Self {
            work: Work::new(&device)?,
            general: Arc::clone(model.kernels()),
            library,
            copies,
            attention,
            pages,
            caps,
            numerics: config.numerics,
            flights: VecDeque::new(),
            idle,
            drawn: VecDeque::new(),
            sampler: SampleScratch::default(),
            masks: None,
            stream,
            model,
        })
    }

    /// Appends the logits `[positions][vocab]` of every position of one row, computed as in a
    /// step of its own. For comparison with references; nothing is sampled or remembered.
    ///
    /// # Errors
    /// A page table that does not fit, no memory, or the driver refuses.
    pub fn logits(
        &mut self,
        tokens: &[Token],
        row: KvRow<'_>,
        out: &mut Vec<f32>,
    ) -> Result<(), CudaError> {
        let device = self.stream.device().clone();
        let stream = Arc::clone(&self.stream);
        let mut slot = Slot::new(&device, self.numerics, 0)?;
        let picks: Vec<u32> = (0..row.len).collect();
        let given = BatchRows {
            tokens,
            rows: &[row],
            picks: &picks,
            feed: &[],
        };
        slot.batch.set(&self.stream, &self.pages, &given)?;
        self.make_room(&mut slot)?;
        self.layers(&stream, &slot)?;
        self.pick_logits(&stream, &mut slot)?;
        let logits = self.stream.download_now(&slot.logits)?;
        let len = picks.len() * self.caps.vocab as usize;
        out.extend_from_slice(logits.get(..len).unwrap_or_default());
        Ok(())
    }

    /// Nanoseconds that copying a page to or from the host tier takes; None without one. To be
    /// asked before the first step.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn measure_copies(&self) -> Result<Option<u64>, CudaError> {
        self.copies.measure_page_ns()
    }

    /// Graphs of decode steps that are held, and their bytes of device memory. A step in flight has
    /// its own with it.
    #[must_use]
    pub fn graphs(&self) -> (usize, u64) {
        let counts = self.idle.iter().map(|slot| slot.graphs.count());
        let bytes = self.idle.iter().map(|slot| slot.graphs.bytes());
        (counts.sum(), bytes.sum())
    }

    /// Where the compiled kernels came from.
    #[must_use]
    pub fn code_origin(&self) -> CodeOrigin {
        self.attention.origin()
    }

    fn limits(&self) -> plan_check::Limits {
        plan_check::Limits {
            vocab: self.caps.vocab,
            pages: self.pages.total(),
            page_tokens: self.caps.layout.page_tokens(),
        }
    }

    /// Where the first token of a row is.
    fn first(&self, input: RowInput) -> First {
        let RowInput::FromStep { step, row } = input else {
            return First::Known;
        };
        if let Some(at) = self
            .flights
            .iter()
            .position(|flight| flight.plan.id == step)
            && let Some(flight) = self.flights.get(at)
        {
            return match &flight.output {
                Some(Ok(output)) => token_of(output, row),
                Some(Err(_)) => First::Missing,
                None => flight
                    .slot
                    .pick_of(row)
                    .map_or(First::Missing, |pick| First::Pick(at, pick)),
            };
        }
        let drawn = self.drawn.iter().find(|drawn| drawn.step == step);
        let token = drawn.and_then(|drawn| *drawn.tokens.get(row as usize)?);
        token.map_or(First::Missing, First::Token)
    }

    /// Brings home what a plan's rows continue from, where the host draws it.
    fn settle_sources(&mut self, plan: &StepPlan) {
        for row in &plan.rows {
            if let First::Pick(at, pick) = self.first(row.input)
                && self
                    .flights
                    .get(at)
                    .is_some_and(|flight| !flight.slot.on_device(pick))
            {
                self.settle(at);
            }
        }
    }

    /// Queues a plan on the stream.
    fn start(&mut self, plan: &StepPlan, slot: &mut Slot) -> Result<(), CudaError> {
        let mut tokens = Vec::new();
        let mut rows = Vec::new();
        let mut picks = Vec::new();
        let mut feed = Vec::new();
        let mut source = None;
        slot.picks.clear();
        slot.standing.clear();
        slot.standing.extend_from_slice(&plan.after);
        for (index, row) in plan.rows.iter().enumerate() {
            let start = tokens.len();
            let first = self.first(row.input);
            if matches!(first, First::Missing) {
                continue;
            }
            tokens.extend_from_slice(plan.row_tokens(row));
            match (first, tokens.get_mut(start)) {
                (First::Token(token), Some(slot)) => *slot = token,
                (First::Pick(at, pick), _) => {
                    feed.push((u32::try_from(start).unwrap_or(u32::MAX), pick));
                    source = Some(at);
                }
                (First::Known | First::Missing | First::Token(_), _) => {}
            }
            rows.push(KvRow {
                first_pos: row.first_pos,
                len: row.len,
                pages: plan.row_pages(row),
            });
            if let Some(spec) = &row.sample {
                picks.push(u32::try_from(tokens.len()).unwrap_or(u32::MAX) - 1);
                slot.picks.push(Pick::new(index, row.request, spec));
            }
        }
        let given = BatchRows {
            tokens: &tokens,
            rows: &rows,
            picks: &picks,
            feed: &feed,
        };
        let size = graph_size(slot, &given);
        let stream = Arc::clone(&self.stream);
        slot.batch
            .set_padded(&stream, &self.pages, &given, size.unwrap_or(0))?;
        if let Some(flight) = source.and_then(|at| self.flights.get(at)) {
            self.general
                .feed(&stream, &slot.batch, &flight.slot.drawn)?;
        }
        self.make_room(slot)?;
        if slot.batch.picks() > 0 {
            self.prepare_draws(slot)?;
        }
        self.compute(slot, size.is_some())?;
        self.fetch_draws(slot)?;
        slot.done.record(&self.stream)?;
        self.copies.step_launched(&self.stream)
    }

    fn remember(&mut self, step: StepId, output: Option<&StepOutput>) {
        if self.drawn.len() >= usize::from(self.caps.max_in_flight) {
            self.drawn.pop_front();
        }
        let tokens = output.map_or_else(Vec::new, |output| {
            let rows = output.rows.iter();
            rows.map(|row| row.accepted.last().copied()).collect()
        });
        self.drawn.push_back(Drawn { step, tokens });
    }
}

impl Backend for CudaBackend {
    fn caps(&self) -> Caps {
        self.caps.clone()
    }

    fn launch(&mut self, mut plan: StepPlan) -> Result<(), StepError> {
        plan_check::check(&plan, &self.limits())?;
        self.settle_sources(&plan);
        // Who has a history is drawn for on the host, so its tokens are home by now.
        sampling::complete_histories(&mut plan, |step, row| {
            match self.first(RowInput::FromStep { step, row }) {
                First::Token(token) => Some(token),
                First::Known | First::Pick(..) | First::Missing => None,
            }
        });
        let Some(mut slot) = self.idle.pop() else {
            return Err(StepError::Full {
                step: plan.id,
                in_flight: u8::try_from(self.flights.len()).unwrap_or(u8::MAX),
                max_in_flight: self.caps.max_in_flight,
            });
        };
        if let Err(error) = self.start(&plan, &mut slot) {
            // Whatever was queued must be over before its buffers are used again.
            if self.stream.synchronize().is_err() {
                return Err(StepError::Lost {
                    step: plan.id,
                    message: "the device does not finish its work".into(),
                });
            }
            self.idle.push(slot);
            return Err(failed(plan.id, &error));
        }
        self.flights.push_back(Flight {
            plan,
            slot,
            output: None,
        });
        Ok(())
    }

    fn is_done(&mut self, step: StepId) -> bool {
        let flight = self.flights.iter().find(|flight| flight.plan.id == step);
        // An error is for `wait` to tell.
        flight.is_none_or(|it| it.output.is_some() || it.slot.done.passed().unwrap_or(true))
    }

    fn wait(&mut self, step: StepId) -> Result<StepOutput, StepError> {
        if self
            .flights
            .front()
            .is_none_or(|flight| flight.plan.id != step)
        {
            return Err(StepError::NotInFlight { step });
        }
        self.settle(0);
        let Some(flight) = self.flights.pop_front() else {
            return Err(StepError::NotInFlight { step });
        };
        let result = flight
            .output
            .unwrap_or(Err(StepError::NotInFlight { step }));
        if result.is_err() && self.stream.synchronize().is_err() {
            // The step's buffers may be in use until the device is idle, and it cannot say.
            return Err(StepError::Lost {
                step,
                message: "the device does not finish its work".into(),
            });
        }
        self.idle.push(flight.slot);
        self.remember(step, result.as_ref().ok());
        result
    }

    fn completes_histories(&self) -> bool {
        true
    }

    fn orders_layers(&self) -> bool {
        true
    }

    fn copies(&mut self) -> &mut dyn CopyEngine {
        &mut self.copies
    }

    fn use_masks(&mut self, masks: Arc<dyn Masks>) -> bool {
        self.masks = Some(masks);
        true
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Buffers go after this; steps that nobody waited for still use them.
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!(%error, "the device did not finish its steps");
        }
    }
}

/// The size of graph that computes these rows; None: they are launched kernel by kernel.
fn graph_size(slot: &Slot, given: &BatchRows<'_>) -> Option<u32> {
    let decodes = given.rows.iter().all(|row| row.len == 1) && !given.picks.is_empty();
    // A graph waits for no copy.
    if !decodes || !slot.graphs.enabled() || !slot.standing.is_empty() {
        return None;
    }
    graphs::size_for(given.rows.len())
}

fn token_of(output: &StepOutput, row: u32) -> First {
    let row = output.rows.get(row as usize);
    let token = row.and_then(|row| row.accepted.last().copied());
    token.map_or(First::Missing, First::Token)
}

/// A failure of the device as a failure of the step.
fn failed(step: StepId, error: &CudaError) -> StepError {
    let message = error.to_string().into();
    if error.is_fatal() {
        StepError::Lost { step, message }
    } else {
        StepError::Failed { step, message }
    }
}

/// cuBLASLt where it is wanted and can be used; otherwise our own kernels compute all products.
fn library(
    device: &Device,
    config: &CudaBackendConfig,
) -> Result<Option<ProductLibrary>, CudaError> {
    if !config.library || config.numerics == Numerics::Invariant {
        return Ok(None);
    }
    match ProductLibrary::open(device) {
        Ok(library) => {
            tracing::info!(version = library.version(), "large products by cuBLASLt");
            Ok(Some(library))
        }
        Err(error) if error.is_fatal() => Err(error),
        Err(error) => {
            tracing::info!(%error, "large products by our own kernels");
            Ok(None)
        }
    }
}

/// Names all that changes the bits of K and V.
fn numerics_id(
    device: &Device,
    config: &CudaBackendConfig,
    library: Option<&ProductLibrary>,
) -> String {
    let (major, minor) = device.compute();
    let mode = match (config.numerics, library) {
        (Numerics::Invariant, _) => "invariant".to_owned(),
        (Numerics::Fast, None) => "fast".to_owned(),
        (Numerics::Fast, Some(library)) => format!("fast-lt{}", library.version()),
    };
    let dtype = config.kv_format.name();
    // 3: all quantized weights are read as they are, none as F16.
    format!("cuda3-sm{major}{minor}-{mode}/kv-{dtype}")
}

/// The pages of a model on a device.
///
/// # Errors
/// A page size or a head width that the kernels do not compute.
pub fn page_shape(
    sizes: &ModelConfig,
    page_tokens: u32,
    format: KvFormat,
) -> Result<PageShape, EngineError> {
    // Of the layout the dimensions count.
    let layout = CpuBackend::layout(sizes, page_tokens, KvDtype::F16)?;
    Ok(PageShape::new(layout, format)?)
}

/// Bytes of a device that a backend takes beside its pages at most, as far as is known before: the
/// workspace of the library, and graphs. Activations and logits are not among them.
#[must_use]
pub fn bytes_beside_pages(config: &CudaBackendConfig) -> u64 {
    let graphs = if config.graphs > 0 {
        graphs::BYTES_MAX
    } else {
        0
    };
    let workspace = if config.library && config.numerics == Numerics::Fast {
        ProductLibrary::workspace_bytes()
    } else {
        0
    };
    workspace + graphs * u64::from(config.max_in_flight.clamp(1, 2))
}

/// Loads the model of a file onto a device.
///
/// # Errors
/// No such device, with the reason; a tensor that is refused, by name; no memory.
pub fn load(file: &Gguf, ordinal: u32, positions: Option<u32>) -> Result<CudaModel, EngineError> {
    let device = Device::open(ordinal)?;
    CudaModel::load(file, &device, positions, code_cache())
}
