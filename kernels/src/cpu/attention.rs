//! Causal attention over pages, for prefill chunks and decode alike.
//!
//! Row tokens at position `p` attend to positions `0..=p` through their page table. K and V,
//! those of the step included, are read back from the arena in the KV dtype, so the result of a
//! token depends on the cached bytes and its position only: not on the chunk, the batch, the page
//! table or the number of threads.
//!
//! This file has the checks, the split into tasks and the scalar reference; `blocked` has the
//! vector path.

mod blocked;

use half::{bf16, f16};
use rootstock_memory::KvSide;

pub(crate) use blocked::Workspace;

use super::error::{KernelError, check_len, checked_area};
use super::isa::Isa;
use super::kv::{Elements, HEAD_DIM_MAX, KvPlace, KvRow, KvView};
use super::lanes::{Kernel, Lanes};
use super::pool::ThreadPool;
use super::scratch::Scratch;
use super::shared::SharedOut;

/// Query vectors of a task: enough to pay for reading and widening K and V.
const TASK_QUERIES: u32 = 192;

/// Tasks per thread that a call is split into when it can be.
const TASKS_PER_THREAD: u32 = 4;

/// Inputs of one layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs<'a> {
    /// Instruction set to use.
    pub isa: Isa,
    /// The arena, with K and V of this step's rows stored.
    pub kv: &'a KvView<'a>,
    /// Layer, from 0.
    pub layer: u32,
    /// Query heads: a multiple of the layout's KV heads.
    pub heads: u32,
    /// Factor on the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// The requests of the step.
    pub rows: &'a [KvRow<'a>],
    /// `[tokens of all rows][heads][head_dim]`, the rows one after another.
    pub q: &'a [f32],
}

/// Some tokens of a row, and the query heads of one KV head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    row: u32,
    kv_head: u32,
    /// First token in the row.
    first: u32,
    tokens: u32,
    /// First token in the step.
    step_token: usize,
}

/// Attention of all rows; `out` has the shape of `q`.
///
/// # Errors
/// Heads that are no multiple of the KV heads, page tables that do not cover their rows, a layer
/// outside the layout, lengths that do not match; a panicked task.
pub fn attention(
    pool: &ThreadPool,
    args: &AttentionArgs<'_>,
    out: &mut [f32],
    scratch: &mut Scratch,
) -> Result<(), KernelError> {
    let layout = args.kv.layout();
    let (heads, kv_heads) = (args.heads, layout.kv_heads());
    if heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(KernelError::HeadsNotDivisible { heads, kv_heads });
    }
    let tokens = args.kv.check(args.layer, args.rows)?;
    let width = heads as usize * layout.head_dim() as usize;
    let wanted = checked_area("attention rows", tokens, width)?;
    check_len("attention queries", args.q.len(), wanted)?;
    check_len("attention output", out.len(), wanted)?;
    split(args, tokens, pool.threads(), &mut scratch.tasks);
    scratch
        .workspaces
        .resize_with(pool.threads(), Workspace::default);
    let tasks = &scratch.tasks;
    let workspaces = SharedOut::new(&mut scratch.workspaces);
    let out = SharedOut::new(out);
    pool.run_indexed(tasks.len(), &|task, thread| {
        // SAFETY: a thread runs one task at a time, with its own workspace.
        let workspace = unsafe { workspaces.part(thread..thread + 1) };
        let [workspace] = workspace else { return };
        args.isa.run(TaskKernel {
            args,
            task: tasks[task],
            next: tasks.get(task + pool.threads()).copied(),
            out: &out,
            workspace,
        });
    })
}

/// Splits the rows into tasks, the longest first.
fn split(args: &AttentionArgs<'_>, tokens: usize, threads: usize, tasks: &mut Vec<Task>) {
    let kv_heads = args.kv.layout().kv_heads();
    let group = args.heads / kv_heads;
    let parts = threads as u32 * TASKS_PER_THREAD;
    let fair = (tokens as u64 * u64::from(kv_heads)).div_ceil(u64::from(parts)) as u32;
    let most = (TASK_QUERIES / group).max(1);
    let chunk = if threads == 1 {
        most
    } else {
        fair.clamp(1, most)
    };
    tasks.clear();
    let mut step_token = 0;
    for (row, KvRow { len, .. }) in (0..).zip(args.rows) {
        for first in (0..*len).step_by(chunk as usize) {
            let tokens = chunk.min(len - first);
            let step_token = step_token + first as usize;
            let task = |kv_head| Task {
                row,
                kv_head,
                first,
                tokens,
                step_token,
            };
            tasks.extend((0..kv_heads).map(task));
        }
        step_token += *len as usize;
    }
    let last = |task: &Task| args.rows[task.row as usize].first_pos + task.first + task.tokens;
    let work = |task: &Task| u64::from(last(task)) * u64::from(task.tokens);
    tasks.sort_unstable_by_key(|task| std::cmp::Reverse(work(task)));
}

/// A task with all it needs.
struct TaskKernel<'a> {
    args: &'a AttentionArgs<'a>,
    task: Task,
    /// What the thread is likely to do after it.
    next: Option<Task>,
    /// This task alone uses the output of its tokens and heads.
    out: &'a SharedOut<'a, f32>,
    workspace: &'a mut Workspace,
}

impl<'a> TaskKernel<'a> {
    fn row(&self) -> &'a KvRow<'a> {
        &self.args.rows[self.task.row as usize]
    }

    /// Query heads of a KV head.
    fn group(&self) -> usize {
        (self.args.heads / self.args.kv.layout().kv_heads()) as usize
    }

    fn head_dim(&self) -> usize {
        self.args.kv.layout().head_dim() as usize
    }

    /// Where the vector of a query head is in `q` and `out`; queries count tokens first.
    fn query_offset(&self, query: usize) -> usize {
        let (token, head) = (query / self.group(), query % self.group());
        let head = self.task.kv_head as usize * self.group() + head;
        let token = self.task.step_token + token;
        (token * self.args.heads as usize + head) * self.head_dim()
    }

    /// Keys that the last query of a task attends to.
    fn keys(&self, task: Task) -> u32 {
        self.args.rows[task.row as usize].first_pos + task.first + task.tokens
    }

    /// The position a query is at: the last one it attends to.
    fn position(&self, query: usize) -> u32 {
        self.row().first_pos + self.task.first + (query / self.group()) as u32
    }

    fn queries(&self) -> usize {
        self.task.tokens as usize * self.group()
    }
}

impl Kernel for TaskKernel<'_> {
    type Output = ();

    fn scalar(self) {
        for query in 0..self.queries() {
            let at = self.query_offset(query);
            let range = at..at + self.head_dim();
            // SAFETY: the output of a token's heads belongs to one task.
            let out = unsafe { self.out.part(range.clone()) };
            self.scalar_query(self.position(query), &self.args.q[range], out);
        }
    }

    #[inline(always)]
    fn simd<L: Lanes>(self, l: L) {
        self.blocked(l);
    }
}

impl TaskKernel<'_> {
    /// The reference: one query at a time, in 64-bit floats.
    fn scalar_query(&self, last: u32, q: &[f32], out: &mut [f32]) {
        let args = self.args;
        let elements = args.kv.elements();
        let place = |position, side| {
            let place = KvPlace {
                position,
                layer: args.layer,
                side,
                head: self.task.kv_head,
            };
            args.kv.offset(self.row(), place)
        };
        let mut acc = [0.0_f64; HEAD_DIM_MAX];
        let (mut max, mut sum) = (f64::NEG_INFINITY, 0.0);
        for position in 0..=last {
            let key = place(position, KvSide::K);
            let score: f64 = (key..)
                .zip(q)
                .map(|(at, q)| elements.at(at) * f64::from(*q))
                .sum();
            let score = score * f64::from(args.scale);
            let new_max = max.max(score);
            let (keep, weight) = ((max - new_max).exp(), (score - new_max).exp());
            max = new_max;
            sum = sum * keep + weight;
            let value = place(position, KvSide::V);
            for (at, acc) in (value..).zip(&mut acc[..q.len()]) {
                *acc = *acc * keep + weight * elements.at(at);
            }
        }
        for (out, acc) in out.iter_mut().zip(acc) {
            *out = (acc / sum) as f32;
        }
    }
}

impl Elements<'_> {
    fn at(self, index: usize) -> f64 {
        f64::from(match self {
            Self::F32(values) => values[index],
            Self::F16(values) => f16::from_bits(values[index]).to_f32(),
            Self::Bf16(values) => bf16::from_bits(values[index]).to_f32(),
        })
    }
}
