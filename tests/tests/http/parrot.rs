//! A backend that repeats its prompt: what a request says after the last `~` (or all of it when
//! there is none) comes back token by token, then the end token. Some bytes are orders:
//! `^` fails the step, `` ` `` panics in it, `@` waits until the test opens the gate, and then is
//! spoken like any other. Where a grammar forbids its next token it says the first that is allowed.
//!
//! With a script it says that instead, see [`super::script`]. Where a grammar forbids what it
//! would say next, it closes what is open before anything else, so that it comes to an end.
//!
//! It keeps the tokens themselves on the KV pages and reads them back through the page tables, so
//! a wrong page changes the text.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rootstock::memory::{
    CopyDone, CopyEngine, CopyPlan, Full, KvDtype, KvLayout, LayoutOrder, LayoutSpec, StepId,
};
use rootstock::scheduler::{Logprobs, Row, RowInput, RowOut, StepOutput, StepPlan, TokenLogprob};
use rootstock::{Backend, Caps, Masks, StepError};

use super::script::Script;
use super::tiny_model::{IM_END, IM_START, VOCAB};

const SAY: u32 = b'~' as u32;
const FAIL: u32 = b'^' as u32;
const PANIC: u32 = b'`' as u32;
const HOLD: u32 = b'@' as u32;

/// The test's side of a parrot.
#[derive(Clone, Debug, Default)]
pub(crate) struct Perch {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    open: bool,
    holding: bool,
    lost: bool,
    /// Tokens drawn, by request.
    drawn: BTreeMap<u64, u32>,
    /// Prompt positions computed in all.
    computed: u64,
}

impl Perch {
    /// Lets steps at `@` go on, for good.
    pub(crate) fn open(&self) {
        self.inner.state.lock().unwrap().open = true;
        self.inner.changed.notify_all();
    }

    /// Waits until a step is at `@`.
    pub(crate) fn until_holding(&self) {
        let state = self.inner.state.lock().unwrap();
        drop(
            self.inner
                .changed
                .wait_while(state, |state| !state.holding)
                .unwrap(),
        );
    }

    /// Every later step fails for good: the engine is lost.
    pub(crate) fn lose(&self) {
        self.inner.state.lock().unwrap().lost = true;
    }

    /// Tokens drawn for the request that drew last to come in.
    pub(crate) fn drawn_by_latest(&self) -> u32 {
        let state = self.inner.state.lock().unwrap();
        state.drawn.last_key_value().map_or(0, |(_, drawn)| *drawn)
    }

    /// Positions computed so far.
    pub(crate) fn computed(&self) -> u64 {
        self.inner.state.lock().unwrap().computed
    }
}

/// The backend.
#[derive(Debug)]
pub(crate) struct Parrot {
    perch: Perch,
    layout: KvLayout,
    kv: Vec<u32>,
    done: BTreeMap<u64, StepOutput>,
    masks: Option<Arc<dyn Masks>>,
    script: Option<Script>,
    /// What requests are being told, by request: the scripted line.
    lines: BTreeMap<u64, Vec<u32>>,
    /// Behind how many tokens requests fail, and the parts that have failed.
    breaks: BTreeMap<u64, u32>,
    broken: BTreeSet<String>,
    /// Positions computed, by request.
    computed: BTreeMap<u64, u32>,
}

impl Parrot {
    /// A parrot with `pages` usable pages of `page_tokens`.
    pub(crate) fn new(perch: &Perch, pages: u32, page_tokens: u32) -> Parrot {
        let spec = LayoutSpec {
            order: LayoutOrder::PageFirst,
            page_tokens,
            layers: 1,
            kv_heads: 1,
            head_dim: 16,
            dtype: KvDtype::F32,
        };
        Parrot {
            perch: perch.clone(),
            layout: KvLayout::new(spec).unwrap(),
            kv: vec![u32::MAX; ((pages + 1) * page_tokens) as usize],
            done: BTreeMap::new(),
            masks: None,
            script: None,
            lines: BTreeMap::new(),
            breaks: BTreeMap::new(),
            broken: BTreeSet::new(),
            computed: BTreeMap::new(),
        }
    }

    /// The same with lines to say. It prints one line a request: whose turn, and how many tokens
    /// of its prompt it did not have to compute, because they were cached or another request was
    /// just computing them.
    pub(crate) fn playing(mut self, script: Script) -> Parrot {
        self.script = Some(script);
        self
    }

    /// The scripted line of a request, at its first token.
    fn begin_line(&mut self, request: u64, prompt: &[u32]) {
        let Some(script) = &self.script else {
            return;
        };
        if self.lines.contains_key(&request) {
            return;
        }
        let text = |token: &u32| match *token {
            IM_START => "<|im_start|>".into(),
            IM_END => "<|im_end|>".into(),
            byte => String::from(char::from(u8::try_from(byte).unwrap_or(b'?'))),
        };
        let text: String = prompt.iter().map(text).collect();
        let line = script.line(&text);
        let computed = self.computed.get(&request).copied().unwrap_or(0);
        println!(
            "turn {:?} {} prompt {} cached {}",
            line.marker,
            line.turn,
            prompt.len(),
            prompt.len() - computed as usize
        );
        if let Some(file) = &line.until {
            while !file.exists() {
                std::thread::park_timeout(Duration::from_millis(20));
            }
        }
        if let Some(at) = line.breaks
            && self.broken.insert(line.marker.clone())
        {
            self.breaks.insert(request, at);
        }
        let said = line.text.bytes().map(u32::from).collect();
        self.lines.insert(request, said);
    }

    fn slot(&self, plan: &StepPlan, row: &Row, position: u32) -> usize {
        let page_tokens = self.layout.page_tokens();
        let page = plan.row_pages(row)[(position / page_tokens) as usize];
        (page.get() * page_tokens + position % page_tokens) as usize
    }

    fn run(&mut self, plan: &StepPlan) -> Result<StepOutput, StepError> {
        let mut rows = Vec::new();
        for row in &plan.rows {
            assert_eq!(row.input, RowInput::Known, "one step in flight only");
            for (position, token) in (row.first_pos..).zip(plan.row_tokens(row)) {
                let slot = self.slot(plan, row, position);
                self.kv[slot] = *token;
            }
            self.perch.inner.state.lock().unwrap().computed += u64::from(row.len);
            *self.computed.entry(row.request.0).or_default() += row.len;
            rows.push(self.draw(plan, row)?);
        }
        Ok(StepOutput { rows })
    }

    fn draw(&mut self, plan: &StepPlan, row: &Row) -> Result<RowOut, StepError> {
        let Some(sample) = &row.sample else {
            return Ok(RowOut::default());
        };
        let line = self.lines.get(&row.request.0);
        let token = match line {
            Some(line) => {
                let next = line.get(sample.output_index as usize);
                next.copied().unwrap_or(IM_END)
            }
            None => self.first_or_echo(plan, row, sample.output_index),
        };
        if self.script.is_none() {
            self.obey(token, plan.id)?;
        } else if self.breaks.get(&row.request.0) == Some(&sample.output_index) {
            return Err(StepError::Failed {
                step: plan.id,
                message: "the script breaks here".into(),
            });
        }
        let token = self.allowed(row, sample.output_index, token);
        *self
            .perch
            .inner
            .state
            .lock()
            .unwrap()
            .drawn
            .entry(row.request.0)
            .or_default() += 1;
        let logprobs = sample.params.logprobs.map(|count| {
            let top = (0..u32::from(count))
                .map(|rank| (rank + 65, -1.0 - rank as f32))
                .collect();
            Box::new(Logprobs {
                tokens: vec![TokenLogprob {
                    token,
                    logprob: -0.5,
                    top,
                }],
            })
        });
        Ok(RowOut {
            accepted: [token].into_iter().collect(),
            logprobs,
        })
    }

    /// What the prompt or the script wants said.
    fn first_or_echo(&mut self, plan: &StepPlan, row: &Row, output_index: u32) -> u32 {
        let length = row.first_pos + row.len;
        let history: Vec<u32> = (0..length)
            .map(|position| self.kv[self.slot(plan, row, position)])
            .collect();
        let prompt = &history[..(length - output_index) as usize];
        self.begin_line(row.request.0, prompt);
        let (said, start) = match self.lines.get(&row.request.0) {
            Some(line) => (line.as_slice(), 0),
            None => {
                let start = prompt.iter().rposition(|token| *token == SAY);
                (prompt, start.map_or(0, |at| at + 1))
            }
        };
        said.get(start + output_index as usize)
            .copied()
            .unwrap_or(IM_END)
    }

    /// The token, or what the request's grammar allows instead: an end before anything else.
    fn allowed(&self, row: &Row, index: u32, token: u32) -> u32 {
        let Some(masks) = &self.masks else {
            return token;
        };
        let allows = |mask: &[u32], token: u32| {
            mask.get(token as usize / 32)
                .is_some_and(|word| word >> (token % 32) & 1 == 1)
        };
        let token = match masks.allowed(row.request, index) {
            Some(mask) if !allows(&mask, token) => {
                let ends = [IM_END, u32::from(b'"'), u32::from(b'}'), u32::from(b']')];
                let ends = ends.into_iter().filter(|_| token == IM_END);
                let mut all = ends.chain(0..VOCAB);
                all.find(|token| allows(&mask, *token)).unwrap()
            }
            Some(_) | None => token,
        };
        masks.drawn(row.request, index, token);
        token
    }

    fn obey(&self, token: u32, step: StepId) -> Result<(), StepError> {
        let inner = &self.perch.inner;
        let mut state = inner.state.lock().unwrap();
        if state.lost {
            return Err(StepError::Lost {
                step,
                message: "the parrot flew away".into(),
            });
        }
        if token == HOLD && !state.open {
            state.holding = true;
            inner.changed.notify_all();
            state = inner
                .changed
                .wait_while(state, |state| !state.open)
                .unwrap();
            state.holding = false;
        }
        drop(state);
        assert_ne!(token, PANIC, "told to panic");
        if token == FAIL {
            return Err(StepError::Failed {
                step,
                message: "told to fail".into(),
            });
        }
        Ok(())
    }
}

impl Backend for Parrot {
    fn caps(&self) -> Caps {
        Caps {
            layout: self.layout,
            numerics_id: "parrot".into(),
            max_in_flight: 1,
            vocab: VOCAB,
        }
    }

    fn launch(&mut self, plan: StepPlan) -> Result<(), StepError> {
        let output = self.run(&plan)?;
        self.done.insert(plan.id.0, output);
        Ok(())
    }

    fn wait(&mut self, step: StepId) -> Result<StepOutput, StepError> {
        self.done
            .remove(&step.0)
            .ok_or(StepError::NotInFlight { step })
    }

    fn copies(&mut self) -> &mut dyn CopyEngine {
        self
    }

    fn use_masks(&mut self, masks: Arc<dyn Masks>) -> bool {
        self.masks = Some(masks);
        true
    }
}

impl CopyEngine for Parrot {
    fn submit(&mut self, plan: CopyPlan) -> Result<(), (CopyPlan, Full)> {
        panic!("one tier has no copies: {plan:?}")
    }

    fn poll(&mut self, _: &mut Vec<CopyDone>) {}
}
