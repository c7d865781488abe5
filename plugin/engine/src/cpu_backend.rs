//! The CPU backend: runs step plans with the model's mathematics over a paged KV arena.
//!
//! `launch` checks a plan against the arena and the vocabulary and queues it; `wait` computes the
//! oldest one. All rows of a step go through each layer together, prefill chunks and decodes
//! alike: one product over all tokens of the step, K and V stored first and read back by the
//! attention. Only rows that sample reach the output matrix. The kernels keep one accumulation
//! order per element, and nothing here depends on which rows share a step, so a text is the same
//! alone or batched, warm or cold, with one or two steps in flight, stopped or not.
//!
//! A step can be stopped between two layers: it keeps its activations, and another step runs in
//! between (`advance`).
//!
//! A step that fails leaves no trace but in pages of its own rows, and a row that would continue
//! from a failed step is left out and answers with no token.

mod buffers;
mod copies;
mod forward;
pub(crate) mod plan_check;
pub(crate) mod sampling;

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use rootstock::memory::{CopyEngine, KvArena, KvDtype, KvLayout, LayoutOrder, LayoutSpec, StepId};
use rootstock::radix::Token;
use rootstock::scheduler::{StepOutput, StepPlan};
use rootstock::{Backend, Caps, Masks, StepError};
use rootstock_kernels::{KernelError, KvRow, ThreadPool, advise_huge};

pub use copies::ArenaCopies;

use crate::error::EngineError;
use crate::model::{Model, ModelConfig};
use buffers::Buffers;

/// How a backend is set up.
#[derive(Clone, Debug)]
pub struct CpuBackendConfig {
    /// Usable pages of the device arena.
    pub pages: u32,
    /// Tokens a page.
    pub page_tokens: u32,
    /// Element type of K and V in the arena.
    pub kv_dtype: KvDtype,
    /// Threads that compute a step, the engine's own included.
    pub threads: usize,
    /// Steps that may be launched and not yet waited for: 1 or 2.
    pub max_in_flight: u8,
    /// Copies to the host tier that may wait.
    pub copy_queue: usize,
}

impl Default for CpuBackendConfig {
    fn default() -> Self {
        Self {
            pages: 1024,
            page_tokens: 16,
            kv_dtype: KvDtype::F16,
            threads: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            max_in_flight: 1,
            copy_queue: 64,
        }
    }
}

/// An arena that the engine and the copy worker take turns with, a layer or a page at a time.
pub type SharedArena = Arc<Mutex<KvArena>>;

/// Tokens drawn by a finished step, by row, for rows that continue from it.
#[derive(Debug)]
struct Drawn {
    step: StepId,
    tokens: Vec<Option<Token>>,
}

/// A step between two layers.
#[derive(Debug)]
struct Paused {
    plan: StepPlan,
    /// Layer to go on with.
    next: usize,
    /// Its activations.
    buffers: Buffers,
}

/// Runs plans on the CPU. One per replica.
#[derive(Debug)]
pub struct CpuBackend {
    model: Arc<Model>,
    pool: ThreadPool,
    arena: SharedArena,
    copies: ArenaCopies,
    caps: Caps,
    pages: u32,
    queue: VecDeque<StepPlan>,
    /// The step that was stopped between two layers.
    paused: Option<Box<Paused>>,
    /// The last `max_in_flight` finished steps, and one that is under way.
    drawn: VecDeque<Drawn>,
    buffers: Buffers,
    /// Those of a step that runs while another is paused.
    spare: Buffers,
    /// What grammars allow, once there is somebody to ask.
    masks: Option<Arc<dyn Masks>>,
}

impl CpuBackend {
    /// The layout of a model's pages.
    ///
    /// # Errors
    /// A page of these sizes is empty or too large.
    pub fn layout(
        model: &ModelConfig,
        page_tokens: u32,
        dtype: KvDtype,
    ) -> Result<KvLayout, EngineError> {
        Ok(KvLayout::new(LayoutSpec {
            order: LayoutOrder::PageFirst,
            page_tokens,
            layers: model.layers,
            kv_heads: model.kv_heads,
            head_dim: model.head_dim,
            dtype,
        })?)
    }

    /// A backend with its own device arena; `host` is the arena of the host tier, if there is one.
    ///
    /// # Errors
    /// No memory for the arena, or no thread for the copies.
    pub fn new(
        model: Arc<Model>,
        config: &CpuBackendConfig,
        host: Option<SharedArena>,
    ) -> Result<Self, EngineError> {
        let layout = Self::layout(model.config(), config.page_tokens, config.kv_dtype)?;
        let mut arena = KvArena::new(layout, config.pages)?;
        advise_huge(arena.bytes_mut());
        let arena = Arc::new(Mutex::new(arena));
        let copies = ArenaCopies::start(Arc::clone(&arena), host, config.copy_queue)?;
        let dtype = match config.kv_dtype {
            KvDtype::F32 => "f32",
            KvDtype::F16 => "f16",
            KvDtype::Bf16 => "bf16",
        };
        let caps = Caps {
            layout,
            numerics_id: format!("{}/kv-{dtype}", model.isa().numerics_id()),
            max_in_flight: config.max_in_flight.clamp(1, 2),
            vocab: model.config().vocab,
        };
        Ok(Self {
            pool: ThreadPool::new(config.threads),
            arena,
            copies,
            caps,
            pages: config.pages,
            queue: VecDeque::new(),
            paused: None,
            drawn: VecDeque::new(),
            buffers: Buffers::default(),
            spare: Buffers::default(),
            masks: None,
            model,
        })
    }

    /// Appends the logits `[positions][vocab]` of every position of one row, computed as in a
    /// step of its own. For comparison with references; nothing is sampled or remembered.
    ///
    /// # Errors
    /// A token outside the vocabulary, or a page table that does not fit.
    pub fn logits(
        &mut self,
        tokens: &[Token],
        row: KvRow<'_>,
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError> {
        let b = &mut self.buffers;
        b.tokens.clear();
        b.tokens.extend_from_slice(tokens);
        b.positions.clear();
        b.positions
            .extend(row.first_pos..row.first_pos.saturating_add(row.len));
        self.embed()?;
        self.layers(&[row], 0, &AtomicBool::new(false))?;
        self.all_logits(out)
    }

    fn limits(&self) -> plan_check::Limits {
        plan_check::Limits {
            vocab: self.caps.vocab,
            pages: self.pages,
            page_tokens: self.caps.layout.page_tokens(),
        }
    }

    /// Makes a place for what a step draws: without tokens at first.
    fn remember(&mut self, step: StepId) {
        let keep = usize::from(self.caps.max_in_flight) + 1;
        let mut slot = if self.drawn.len() >= keep {
            self.drawn.pop_front()
        } else {
            None
        }
        .unwrap_or_else(|| Drawn {
            step,
            tokens: Vec::new(),
        });
        slot.step = step;
        slot.tokens.clear();
        self.drawn.push_back(slot);
    }

    /// What a row of a finished step drew last.
    fn drawn_by(&self, step: StepId, row: u32) -> Option<Token> {
        let slot = self.drawn.iter().find(|drawn| drawn.step == step)?;
        *slot.tokens.get(row as usize)?
    }

    /// Goes on with a step from layer `next` on, until its end or a pause.
    fn run(
        &mut self,
        plan: StepPlan,
        next: usize,
        pause: &AtomicBool,
    ) -> Result<Option<StepOutput>, StepError> {
        let next = self.run_layers(&plan, next, pause)?;
        if next < self.model.layers.len() {
            let buffers = std::mem::replace(&mut self.buffers, std::mem::take(&mut self.spare));
            self.paused = Some(Box::new(Paused {
                plan,
                next,
                buffers,
            }));
            return Ok(None);
        }
        let output = self.sample_rows(&plan)?;
        if let Some(slot) = self.drawn.iter_mut().find(|drawn| drawn.step == plan.id) {
            slot.tokens
                .extend(output.rows.iter().map(|row| row.accepted.last().copied()));
        }
        Ok(Some(output))
    }
}

impl Backend for CpuBackend {
    fn caps(&self) -> Caps {
        self.caps.clone()
    }

    fn launch(&mut self, plan: StepPlan) -> Result<(), StepError> {
        let max_in_flight = self.caps.max_in_flight;
        let in_flight = u8::try_from(self.queue.len()).unwrap_or(u8::MAX);
        if in_flight >= max_in_flight {
            return Err(StepError::Full {
                step: plan.id,
                in_flight,
                max_in_flight,
            });
        }
        plan_check::check(&plan, &self.limits())?;
        self.queue.push_back(plan);
        Ok(())
    }

    fn wait(&mut self, step: StepId) -> Result<StepOutput, StepError> {
        let never = AtomicBool::new(false);
        let done = self.advance(step, &never)?;
        done.ok_or(StepError::NotInFlight { step })
    }

    fn can_pause(&self) -> bool {
        true
    }

    fn verifies(&self) -> bool {
        true
    }

    fn completes_histories(&self) -> bool {
        true
    }

    fn advance(
        &mut self,
        step: StepId,
        pause: &AtomicBool,
    ) -> Result<Option<StepOutput>, StepError> {
        if let Some(paused) = self.paused.take_if(|paused| paused.plan.id == step) {
            let Paused {
                plan,
                next,
                buffers,
            } = *paused;
            self.spare = std::mem::replace(&mut self.buffers, buffers);
            return self.run(plan, next, pause);
        }
        if self.queue.front().is_none_or(|plan| plan.id != step) {
            return Err(StepError::NotInFlight { step });
        }
        let Some(mut plan) = self.queue.pop_front() else {
            return Err(StepError::NotInFlight { step });
        };
        self.remember(step);
        sampling::complete_histories(&mut plan, |step, row| self.drawn_by(step, row));
        self.start(&plan)?;
        self.run(plan, 0, pause)
    }

    fn copies(&mut self) -> &mut dyn CopyEngine {
        &mut self.copies
    }

    fn use_masks(&mut self, masks: Arc<dyn Masks>) -> bool {
        self.masks = Some(masks);
        true
    }
}

/// A failure of the kernels as a failure of the step.
fn failed(step: StepId) -> impl Fn(KernelError) -> StepError {
    move |error| StepError::Failed {
        step,
        message: error.to_string().into(),
    }
}
