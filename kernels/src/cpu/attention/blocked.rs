//! Attention on vectors: blocks of 64 keys, aligned to absolute positions, with running maxima.
//!
//! Per block and KV head, keys and values are widened to 32 bits once for all queries of the
//! task; keys are transposed, so that a vector holds one dimension of 16 keys. Then, for a few
//! queries at a time: scores, the new maximum, weights `exp(score - max)`, and the weighted
//! values on top of the rescaled sums so far.
//!
//! The order of every sum is fixed by the position alone: scores ascend the dimensions, weighted
//! values ascend the positions, sums of weights go by lane and ascend the blocks. A key past a
//! query's own position is never added, not even with weight zero, so a later token cannot reach
//! an earlier one through an infinity either.
//!
//! Source: the running maximum is that of FlashAttention (Dao et al. 2022); the code is our own.

use rootstock_memory::KvSide;

use super::{Task, TaskKernel};
use crate::cpu::kv::{Elements, KvPlace, KvWalk};
use crate::cpu::lanes::{LANES, Lanes, Line, exp_small};

/// Keys of a block.
const BLOCK: usize = 64;

/// Vectors of keys in a block.
const BLOCK_LINES: usize = BLOCK / LANES;

/// Queries that share the registers.
const QUERIES: usize = 6;

/// The buffers of one thread.
#[derive(Default)]
pub(crate) struct Workspace {
    /// `[16 keys][head_dim]`, a line holding one dimension of 16 keys.
    keys: Vec<Line>,
    /// `[head_dim / 16][key]`, a line holding 16 dimensions of a key.
    values: Vec<Line>,
    /// `[query][head_dim]`, scaled.
    q: Vec<f32>,
    /// `[query][head_dim]`: weighted values so far, side by side, so that they stay in the caches.
    sums: Vec<f32>,
    /// `[query]`.
    states: Vec<State>,
}

/// A query's running maximum and, by lane, sum of weights.
#[derive(Clone, Copy)]
struct State {
    max: f32,
    sums: Line,
}

/// The part of a task that one block takes.
#[derive(Clone, Copy)]
struct Block {
    /// First position.
    start: u32,
    /// Keys that the last query of the task attends to.
    keys: usize,
}

impl<'a> TaskKernel<'a> {
    #[inline(always)]
    pub(super) fn blocked<L: Lanes>(mut self, l: L) {
        let queries = self.queries();
        self.begin(l);
        let end = self.keys(self.task);
        for start in (0..end).step_by(BLOCK) {
            let block = Block {
                start,
                keys: ((end - start) as usize).min(BLOCK),
            };
            self.widen(l, block);
            let mut query = 0;
            while query < queries {
                let left = queries - query;
                let attends = self.position(query) >= start;
                let step = match left {
                    _ if !attends => 1,
                    QUERIES.. => QUERIES,
                    _ => left,
                };
                match step {
                    _ if !attends => {}
                    6 => self.queries_block::<L, 6>(l, block, query),
                    5 => self.queries_block::<L, 5>(l, block, query),
                    4 => self.queries_block::<L, 4>(l, block, query),
                    3 => self.queries_block::<L, 3>(l, block, query),
                    2 => self.queries_block::<L, 2>(l, block, query),
                    _ => self.queries_block::<L, 1>(l, block, query),
                }
                query += step;
            }
        }
        self.finish(l);
    }

    /// Sizes the buffers, scales the queries, clears the sums.
    #[inline(always)]
    fn begin<L: Lanes>(&mut self, l: L) {
        let (queries, head_dim) = (self.queries(), self.head_dim());
        self.workspace
            .keys
            .resize(BLOCK_LINES * head_dim, [0.0; LANES]);
        self.workspace
            .values
            .resize(BLOCK * head_dim / LANES, [0.0; LANES]);
        self.workspace.q.resize(queries * head_dim, 0.0);
        self.workspace.sums.clear();
        self.workspace.sums.resize(queries * head_dim, 0.0);
        self.workspace.states.clear();
        let fresh = State {
            max: f32::NEG_INFINITY,
            sums: [0.0; LANES],
        };
        self.workspace.states.resize(queries, fresh);
        let scale = l.splat(self.args.scale);
        for query in 0..queries {
            let at = self.query_offset(query);
            let from = self.args.q[at..at + head_dim].as_chunks::<LANES>().0;
            let to = &mut self.workspace.q[query * head_dim..][..head_dim];
            for (from, to) in from.iter().zip(to.as_chunks_mut::<LANES>().0) {
                l.store(l.mul(l.load(from), scale), to);
            }
        }
    }

    /// Divides by the sums of weights, into the output.
    #[inline(always)]
    fn finish<L: Lanes>(&self, l: L) {
        let head_dim = self.head_dim();
        for query in 0..self.queries() {
            let at = self.query_offset(query);
            // SAFETY: the output of a token's heads belongs to this task, which uses one at a time.
            let out = unsafe { self.out.part(at..at + head_dim) };
            let factor = 1.0 / l.sum(l.load(&self.workspace.states[query].sums));
            let sums = &self.workspace.sums[query * head_dim..][..head_dim];
            let lines = out.as_chunks_mut::<LANES>().0.iter_mut();
            for (out, sum) in lines.zip(sums.as_chunks::<LANES>().0) {
                l.store(l.mul(l.load(sum), l.splat(factor)), out);
            }
        }
    }

    /// Fills the workspace with a block's keys, transposed, and values.
    #[inline(always)]
    fn widen<L: Lanes>(&mut self, l: L, block: Block) {
        match self.args.kv.elements() {
            Elements::F32(all) => self.widen_from(l, block, F32(all)),
            Elements::F16(all) => self.widen_from(l, block, F16(all)),
            Elements::Bf16(all) => self.widen_from(l, block, Bf16(all)),
        }
    }

    #[inline(always)]
    fn widen_from<L: Lanes, S: Source>(&mut self, l: L, block: Block, source: S) {
        let head_dim = self.head_dim();
        let head_lines = head_dim / LANES;
        let value_offset = self.args.kv.layout().side_stride();
        let mut walk = self.walk(self.task, block.start);
        let (mut walk_ahead, mut keys_ahead) = self.ahead(block);
        let pace = keys_ahead.div_ceil(block.keys);
        // Rows past the last key keep what they had: their scores are never used.
        let mut square = [[0.0; LANES]; LANES];
        for first in (0..block.keys).step_by(LANES) {
            let count = LANES.min(block.keys - first);
            let mut offsets = [0; LANES];
            for (key, offset) in (first..first + count).zip(&mut offsets) {
                *offset = walk.step();
                let from = *offset + value_offset;
                let to = self.workspace.values[key..].iter_mut().step_by(BLOCK);
                for (index, to) in to.take(head_lines).enumerate() {
                    l.store(source.load(l, from + index * LANES), to);
                }
                // Pages lie far apart, so the processor does not foresee the next one.
                for _ in 0..pace.min(keys_ahead) {
                    keys_ahead -= 1;
                    let at = walk_ahead.step();
                    source.prefetch(l, at, head_dim);
                    source.prefetch(l, at + value_offset, head_dim);
                }
            }
            let keys = &mut self.workspace.keys[first / LANES * head_dim..][..head_dim];
            for (index, out) in keys.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                for (offset, row) in offsets[..count].iter().zip(&mut square) {
                    l.store(source.load(l, offset + index * LANES), row);
                }
                l.transpose(&square, out);
            }
        }
    }

    /// Where the keys of the block after this one are, in this task or the next, and how many.
    #[inline(always)]
    fn ahead(&self, block: Block) -> (KvWalk<'a>, usize) {
        let start = block.start.saturating_add(BLOCK as u32);
        let (walk, keys) = match (self.keys(self.task).saturating_sub(start), self.next) {
            (0, Some(next)) => (self.walk(next, 0), self.keys(next)),
            (left, _) => (self.walk(self.task, start), left),
        };
        (walk, (keys as usize).min(BLOCK))
    }

    /// Walks over the keys of a task's head, from a position on.
    #[inline(always)]
    fn walk(&self, task: Task, position: u32) -> KvWalk<'a> {
        let place = KvPlace {
            position,
            layer: self.args.layer,
            side: KvSide::K,
            head: task.kv_head,
        };
        KvWalk::new(self.args.kv, &self.args.rows[task.row as usize], place)
    }

    /// One block for `MB` queries, all of which attend to its first key.
    #[inline(always)]
    fn queries_block<L: Lanes, const MB: usize>(&mut self, l: L, block: Block, query: usize) {
        let mut limits = [0; MB];
        for (i, limit) in limits.iter_mut().enumerate() {
            let keys = self.position(query + i) - block.start + 1;
            *limit = (keys as usize).min(BLOCK);
        }
        let mut weights = [[0.0; BLOCK]; MB];
        self.scores::<L, MB>(l, query, limits, &mut weights);
        let states = &mut self.workspace.states[query..query + MB];
        // Limits ascend with the queries. The usual case by its own constants.
        let keeps = if limits[0] == BLOCK {
            soften::<L, MB>(l, states, [BLOCK; MB], &mut weights)
        } else {
            soften::<L, MB>(l, states, limits, &mut weights)
        };
        self.weigh::<L, MB>(l, query, limits, (&weights, &keeps));
    }

    /// Scores of the keys, 16 at a time; past a query's limit they mean nothing.
    #[inline(always)]
    fn scores<L: Lanes, const MB: usize>(
        &self,
        l: L,
        query: usize,
        limits: [usize; MB],
        scores: &mut [[f32; BLOCK]; MB],
    ) {
        let head_dim = self.head_dim();
        let mut q: [&[f32]; MB] = [&[]; MB];
        for (i, q) in q.iter_mut().enumerate() {
            *q = &self.workspace.q[(query + i) * head_dim..][..head_dim];
        }
        let lines = limits[MB - 1].div_ceil(LANES);
        let mut line = 0;
        while L::ROOMY && MB <= 3 && line + 4 <= lines {
            self.score_lines::<L, MB, 4>(l, &q, line, scores);
            line += 4;
        }
        while L::ROOMY && line + 2 <= lines {
            self.score_lines::<L, MB, 2>(l, &q, line, scores);
            line += 2;
        }
        while line < lines {
            self.score_lines::<L, MB, 1>(l, &q, line, scores);
            line += 1;
        }
    }

    /// Scores of `NT` lines of keys, from `line` on.
    #[inline(always)]
    fn score_lines<L: Lanes, const MB: usize, const NT: usize>(
        &self,
        l: L,
        q: &[&[f32]; MB],
        line: usize,
        scores: &mut [[f32; BLOCK]; MB],
    ) {
        let head_dim = self.head_dim();
        let mut keys: [&[Line]; NT] = [&[]; NT];
        for (index, keys) in (line..).zip(&mut keys) {
            *keys = &self.workspace.keys[index * head_dim..][..head_dim];
        }
        let mut sums = [[l.splat(0.0); NT]; MB];
        for dim in 0..head_dim {
            for (sums, q) in sums.iter_mut().zip(q) {
                let q = l.splat(q[dim]);
                for (sum, keys) in sums.iter_mut().zip(&keys) {
                    *sum = l.mul_add(q, l.load(&keys[dim]), *sum);
                }
            }
        }
        for (scores, sums) in scores.iter_mut().zip(sums) {
            let lines = scores.as_chunks_mut().0[line..].iter_mut();
            for (score, sum) in lines.zip(sums) {
                l.store(sum, score);
            }
        }
    }

    /// Adds the weighted values to the rescaled sums.
    #[inline(always)]
    fn weigh<L: Lanes, const MB: usize>(
        &mut self,
        l: L,
        query: usize,
        limits: [usize; MB],
        (weights, keeps): (&[[f32; BLOCK]; MB], &Line),
    ) {
        let head_lines = self.head_dim() / LANES;
        let mut line = 0;
        while L::ROOMY && MB <= 3 && line + 4 <= head_lines {
            self.weigh_lines::<L, MB, 4>(l, (query, line), limits, (weights, keeps));
            line += 4;
        }
        while L::ROOMY && line + 2 <= head_lines {
            self.weigh_lines::<L, MB, 2>(l, (query, line), limits, (weights, keeps));
            line += 2;
        }
        while line < head_lines {
            self.weigh_lines::<L, MB, 1>(l, (query, line), limits, (weights, keeps));
            line += 1;
        }
    }

    /// The same for `NT` lines of dimensions.
    #[inline(always)]
    fn weigh_lines<L: Lanes, const MB: usize, const NT: usize>(
        &mut self,
        l: L,
        (query, line): (usize, usize),
        limits: [usize; MB],
        (weights, keeps): (&[[f32; BLOCK]; MB], &Line),
    ) {
        let head_dim = self.head_dim();
        let so_far = &mut self.workspace.sums[query * head_dim..][..MB * head_dim];
        // Limits ascend with the queries.
        let common = limits[0].min(BLOCK);
        let mut sums = [[l.splat(0.0); NT]; MB];
        for (i, sums) in sums.iter_mut().enumerate() {
            let keep = l.splat(keeps[i]);
            let so_far = &so_far[i * head_dim..][..head_dim];
            for (sum, so_far) in sums.iter_mut().zip(&so_far.as_chunks::<LANES>().0[line..]) {
                *sum = l.mul(l.load(so_far), keep);
            }
        }
        let mut values: [&[Line]; NT] = [&[]; NT];
        for (index, values) in (line..).zip(&mut values) {
            *values = &self.workspace.values[index * BLOCK..][..BLOCK];
        }
        for key in 0..common {
            for (sums, weights) in sums.iter_mut().zip(weights) {
                let weight = l.splat(weights[key]);
                for (sum, values) in sums.iter_mut().zip(&values) {
                    *sum = l.mul_add(weight, l.load(&values[key]), *sum);
                }
            }
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            for key in common..limits[i] {
                let weight = l.splat(weights[i][key]);
                for (sum, values) in sums.iter_mut().zip(&values) {
                    *sum = l.mul_add(weight, l.load(&values[key]), *sum);
                }
            }
            let so_far = &mut so_far[i * head_dim..][..head_dim];
            let so_far = &mut so_far.as_chunks_mut::<LANES>().0[line..];
            for (so_far, sum) in so_far.iter_mut().zip(*sums) {
                l.store(sum, so_far);
            }
        }
    }
}

/// Turns the queries' scores into weights; returns, by query, the factors on what was summed
/// before.
///
/// In rounds over all queries, so that their chains of operations overlap.
#[inline(always)]
fn soften<L: Lanes, const MB: usize>(
    l: L,
    states: &mut [State],
    limits: [usize; MB],
    scores: &mut [[f32; BLOCK]; MB],
) -> Line {
    let lowest = l.splat(f32::NEG_INFINITY);
    let mut largest = [lowest; MB];
    for (i, largest) in largest.iter_mut().enumerate() {
        let (lines, rest) = parts(&mut scores[i], limits[i]);
        for line in lines {
            *largest = l.max(*largest, l.load(line));
        }
        if let Some((line, count)) = rest {
            *largest = l.max(*largest, l.keep_first(count, l.load(line), lowest));
        }
    }
    let mut keeps = [0.0; LANES];
    for (i, keep) in keeps.iter_mut().enumerate().take(MB) {
        let max = states[i].max.max(l.max_lane(largest[i]));
        *keep = states[i].max - max;
        states[i].max = max;
    }
    l.store(exp_small(l, l.load(&keeps)), &mut keeps);
    for (i, scores) in scores.iter_mut().enumerate() {
        let max = l.splat(states[i].max);
        let mut sums = l.mul(l.load(&states[i].sums), l.splat(keeps[i]));
        let (lines, rest) = parts(scores, limits[i]);
        for line in lines {
            let weight = exp_small(l, l.sub(l.load(line), max));
            sums = l.add(sums, weight);
            l.store(weight, line);
        }
        if let Some((line, count)) = rest {
            let weight = exp_small(l, l.sub(l.load(line), max));
            let weight = l.keep_first(count, weight, l.splat(0.0));
            sums = l.add(sums, weight);
            l.store(weight, line);
        }
        l.store(sums, &mut states[i].sums);
    }
    keeps
}

/// The whole lines of the first `limit` scores, and the line of the others with their number.
#[inline(always)]
fn parts(scores: &mut [f32; BLOCK], limit: usize) -> (&mut [Line], Option<(&mut Line, usize)>) {
    let (lines, rest) = scores
        .as_chunks_mut::<LANES>()
        .0
        .split_at_mut(limit / LANES);
    match (rest.first_mut(), limit % LANES) {
        (Some(line), count) if count > 0 => (lines, Some((line, count))),
        _ => (lines, None),
    }
}

/// Reads 16 elements of the arena as 32-bit floats.
trait Source: Copy {
    fn load<L: Lanes>(self, l: L, at: usize) -> L::F;
    /// Asks for the cache lines of `count` elements.
    fn prefetch<L: Lanes>(self, l: L, at: usize, count: usize);
}

/// Asks for the cache lines of some bytes.
#[inline(always)]
fn prefetch<L: Lanes>(l: L, bytes: &[u8]) {
    let mut line = 0;
    while line < bytes.len() {
        l.prefetch(bytes, line);
        line += 64;
    }
}

#[derive(Clone, Copy)]
struct F32<'a>(&'a [f32]);
#[derive(Clone, Copy)]
struct F16<'a>(&'a [u16]);
#[derive(Clone, Copy)]
struct Bf16<'a>(&'a [u16]);

impl Source for F32<'_> {
    #[inline(always)]
    fn load<L: Lanes>(self, l: L, at: usize) -> L::F {
        l.load(
            self.0[at..]
                .first_chunk()
                .expect("whole heads in the arena"),
        )
    }

    #[inline(always)]
    fn prefetch<L: Lanes>(self, l: L, at: usize, count: usize) {
        prefetch(l, bytemuck::cast_slice(&self.0[at..at + count]));
    }
}

impl Source for F16<'_> {
    #[inline(always)]
    fn load<L: Lanes>(self, l: L, at: usize) -> L::F {
        l.load_f16(
            self.0[at..]
                .first_chunk()
                .expect("whole heads in the arena"),
        )
    }

    #[inline(always)]
    fn prefetch<L: Lanes>(self, l: L, at: usize, count: usize) {
        prefetch(l, bytemuck::cast_slice(&self.0[at..at + count]));
    }
}

impl Source for Bf16<'_> {
    #[inline(always)]
    fn load<L: Lanes>(self, l: L, at: usize) -> L::F {
        l.load_bf16(
            self.0[at..]
                .first_chunk()
                .expect("whole heads in the arena"),
        )
    }

    #[inline(always)]
    fn prefetch<L: Lanes>(self, l: L, at: usize, count: usize) {
        prefetch(l, bytemuck::cast_slice(&self.0[at..at + count]));
    }
}
