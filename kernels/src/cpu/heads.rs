//! Query, key and value heads between the products and the attention: normed, turned, and K and V
//! stored in the arena, in one run over the heads.
//!
//! A task has whole heads, so no two tasks write to the same place of the arena whatever the page
//! tables say. The same, bit for bit, as `qk_norm`, `rope` and `store_kv` one after the other.

use rootstock_memory::{KvLayout, KvSide};

use super::error::{KernelError, check_len, checked_area};
use super::isa::Isa;
use super::kv::{KvPlace, KvRow, KvView, Store, offset};
use super::lanes::{Inner, Kernel, Lanes, Reference, Within};
use super::norm::RmsNorm;
use super::pool::ThreadPool;
use super::rope::{RopeAngles, RopeStyle, Turn};
use super::shared::SharedOut;

/// Calls of fewer elements are not worth waking a thread for.
const SERIAL_ELEMENTS: usize = 1 << 14;

/// What one layer does with its heads.
#[derive(Clone, Copy, Debug)]
pub struct HeadArgs<'a> {
    /// Instruction set to use.
    pub isa: Isa,
    /// Layer, from 0.
    pub layer: u32,
    /// The requests of the step.
    pub rows: &'a [KvRow<'a>],
    /// Which elements of a head turn together.
    pub style: RopeStyle,
    /// Angles of the step's positions.
    pub angles: &'a RopeAngles,
    /// `[head_dim]`: norm of each query head before it is turned.
    pub q_norm: Option<&'a [f32]>,
    /// `[head_dim]`: norm of each key head before it is turned.
    pub k_norm: Option<&'a [f32]>,
    /// Epsilon of the norms.
    pub eps: f32,
}

/// The heads of a step, row-major over its tokens.
#[derive(Debug)]
pub struct Heads<'a> {
    /// `[tokens][heads][head_dim]`.
    pub q: &'a mut [f32],
    /// `[tokens][kv_heads][head_dim]`.
    pub k: &'a mut [f32],
    /// `[tokens][kv_heads][head_dim]`.
    pub v: &'a [f32],
}

/// Norms and turns queries and keys, and stores keys and values in the KV dtype.
///
/// # Errors
/// Page tables that do not cover their rows, a layer outside the layout, angles for another
/// number of tokens, lengths that do not match; a panicked task.
pub fn place_heads(
    pool: &ThreadPool,
    args: &HeadArgs<'_>,
    kv: &mut KvView<'_>,
    heads: Heads<'_>,
) -> Result<(), KernelError> {
    let tokens = kv.check(args.layer, args.rows)?;
    let layout = *kv.layout();
    let (head_dim, kv_heads) = (layout.head_dim() as usize, layout.kv_heads() as usize);
    let kv_len = checked_area("key heads", tokens, kv_heads * head_dim)?;
    check_len("key heads", heads.k.len(), kv_len)?;
    check_len("value heads", heads.v.len(), kv_len)?;
    args.angles.check(tokens, head_dim)?;
    for weight in [args.q_norm, args.k_norm].into_iter().flatten() {
        check_len("head norm", weight.len(), head_dim)?;
    }
    let q_heads = heads.q.len() / (tokens.max(1) * head_dim);
    let q_len = checked_area("query heads", tokens, q_heads * head_dim)?;
    check_len("query heads", heads.q.len(), q_len)?;
    let jobs = q_heads + 2 * kv_heads;
    let parts = if tokens * jobs * head_dim < SERIAL_ELEMENTS {
        1
    } else {
        jobs
    };
    let (q, k) = (SharedOut::new(heads.q), SharedOut::new(heads.k));
    let arena = SharedOut::new(kv.bytes_mut());
    pool.run(parts, &|part| {
        for job in part * jobs / parts..(part + 1) * jobs / parts {
            args.isa.run(Job {
                args,
                layout: &layout,
                job,
                q_heads,
                q: &q,
                k: &k,
                v: heads.v,
                arena: &arena,
            });
        }
    })
}

/// One head of all tokens: of the queries, then of the keys, then of the values.
struct Job<'a> {
    args: &'a HeadArgs<'a>,
    layout: &'a KvLayout,
    job: usize,
    q_heads: usize,
    q: &'a SharedOut<'a, f32>,
    k: &'a SharedOut<'a, f32>,
    v: &'a [f32],
    arena: &'a SharedOut<'a, u8>,
}

impl Kernel for Job<'_> {
    type Output = ();

    fn scalar(self) {
        self.body(Reference);
    }

    #[inline(always)]
    fn simd<L: Lanes>(self, l: L) {
        self.body(Within(l));
    }
}

impl Job<'_> {
    #[inline(always)]
    fn body<I: Inner>(&self, inner: I) {
        let kv_heads = self.layout.kv_heads() as usize;
        match self.job.checked_sub(self.q_heads) {
            None => self.queries(inner),
            Some(head) if head < kv_heads => self.keys(inner, head),
            Some(head) => self.values(inner, head - kv_heads),
        }
    }

    #[inline(always)]
    fn queries<I: Inner>(&self, inner: I) {
        let head_dim = self.layout.head_dim() as usize;
        for token in 0..self.args.angles.rows() {
            let at = (token * self.q_heads + self.job) * head_dim;
            // SAFETY: a head belongs to one task.
            let head = unsafe { self.q.part(at..at + head_dim) };
            self.turn(inner, (token, head), self.args.q_norm);
        }
    }

    #[inline(always)]
    fn keys<I: Inner>(&self, inner: I, kv_head: usize) {
        let head_dim = self.layout.head_dim() as usize;
        let kv_heads = self.layout.kv_heads() as usize;
        let mut token = 0;
        for row in self.args.rows {
            for position in row.first_pos..row.first_pos + row.len {
                let at = (token * kv_heads + kv_head) * head_dim;
                // SAFETY: a head belongs to one task.
                let head = unsafe { self.k.part(at..at + head_dim) };
                self.turn(inner, (token, &mut *head), self.args.k_norm);
                self.store(inner, (row, position), (KvSide::K, kv_head), head);
                token += 1;
            }
        }
    }

    #[inline(always)]
    fn values<I: Inner>(&self, inner: I, kv_head: usize) {
        let head_dim = self.layout.head_dim() as usize;
        let kv_heads = self.layout.kv_heads() as usize;
        let mut token = 0;
        for row in self.args.rows {
            for position in row.first_pos..row.first_pos + row.len {
                let head = &self.v[(token * kv_heads + kv_head) * head_dim..][..head_dim];
                self.store(inner, (row, position), (KvSide::V, kv_head), head);
                token += 1;
            }
        }
    }

    #[inline(always)]
    fn turn<I: Inner>(&self, inner: I, (token, x): (usize, &mut [f32]), norm: Option<&[f32]>) {
        if let Some(weight) = norm {
            let eps = self.args.eps;
            inner.inner(RmsNorm {
                x: &mut *x,
                weight,
                eps,
            });
        }
        let (cos, sin) = self.args.angles.row(token);
        inner.inner(Turn {
            style: self.args.style,
            head: x,
            cos,
            sin,
        });
    }

    #[inline(always)]
    fn store<I: Inner>(
        &self,
        inner: I,
        (row, position): (&KvRow<'_>, u32),
        (side, head): (KvSide, usize),
        values: &[f32],
    ) {
        let place = KvPlace {
            position,
            layer: self.args.layer,
            side,
            head: head as u32,
        };
        let width = self.layout.dtype().bytes() as usize;
        let at = offset(self.layout, row, place) * width;
        // SAFETY: places of different heads and sides do not overlap, and those of one head
        // belong to one task, which uses one at a time.
        let bytes = unsafe { self.arena.part(at..at + values.len() * width) };
        inner.inner(Store {
            bytes,
            dtype: self.layout.dtype(),
            values,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kv::store_kv;
    use crate::cpu::norm::qk_norm;
    use crate::cpu::rope::rope;
    use proptest::prelude::*;
    use rootstock_memory::{KvArena, KvDtype, LayoutOrder, LayoutSpec, PageId};

    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let word = |i: u32| i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8;
        (0..len as u32)
            .map(|i| word(i) as f32 / 8_388_608.0 - 1.0)
            .collect()
    }

    fn arena(dtype: KvDtype, pages: u32) -> KvArena {
        let spec = LayoutSpec {
            order: LayoutOrder::PageFirst,
            page_tokens: 4,
            layers: 2,
            kv_heads: 2,
            head_dim: 32,
            dtype,
        };
        let mut arena = KvArena::new(KvLayout::new(spec).unwrap(), pages).unwrap();
        arena.bytes_mut().fill(0xff);
        arena
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn the_same_as_its_steps_one_by_one(
            lens in prop::collection::vec(1_u32..90, 1..4), neox: bool, normed: bool,
            dtype in prop::sample::select(vec![KvDtype::F32, KvDtype::F16, KvDtype::Bf16]),
            threads in 1_usize..4, seed: u32,
        ) {
            let style = if neox { RopeStyle::Neox } else { RopeStyle::Norm };
            let pages: Vec<Vec<PageId>> = (0..)
                .zip(&lens)
                .map(|(row, len)| {
                    let page = |i| PageId::new(1 + row * 23 + i);
                    (0..len.div_ceil(4)).map(page).collect()
                })
                .collect();
            let rows: Vec<KvRow<'_>> = lens
                .iter()
                .zip(&pages)
                .map(|(&len, pages)| KvRow { first_pos: 0, len, pages })
                .collect();
            let positions: Vec<u32> = lens.iter().flat_map(|len| 0..*len).collect();
            let mut angles = RopeAngles::default();
            angles.set(&noise(16, 7), &positions, 1.0);
            let tokens = positions.len();
            let (q, k) = (noise(tokens * 6 * 32, seed), noise(tokens * 2 * 32, seed ^ 1));
            let v = noise(tokens * 2 * 32, seed ^ 2);
            let weight = noise(32, 9);
            for isa in Isa::available() {
                let (mut q1, mut k1, mut kv1) = (q.clone(), k.clone(), arena(dtype, 80));
                if normed {
                    qk_norm(isa, &mut q1, &weight, 1e-5).unwrap();
                    qk_norm(isa, &mut k1, &weight, 1e-5).unwrap();
                }
                rope(style, &angles, &mut q1, 32).unwrap();
                rope(style, &angles, &mut k1, 32).unwrap();
                store_kv(isa, &mut KvView::of(&mut kv1).unwrap(), 1, &rows, &k1, &v).unwrap();
                let (mut q2, mut k2, mut kv2) = (q.clone(), k.clone(), arena(dtype, 80));
                let norm = normed.then_some(&weight[..]);
                let args = HeadArgs {
                    isa, layer: 1, rows: &rows, style, angles: &angles,
                    q_norm: norm, k_norm: norm, eps: 1e-5,
                };
                let heads = Heads { q: &mut q2, k: &mut k2, v: &v };
                let mut view = KvView::of(&mut kv2).unwrap();
                place_heads(&ThreadPool::new(threads), &args, &mut view, heads).unwrap();
                prop_assert_eq!(&q1, &q2);
                prop_assert_eq!(&k1, &k2);
                prop_assert!(kv1.bytes() == kv2.bytes());
            }
        }
    }

    #[test]
    fn lengths_and_angles_that_do_not_fit_are_refused() {
        let pages = [PageId::new(1)];
        let rows = [KvRow {
            first_pos: 0,
            len: 2,
            pages: &pages,
        }];
        let mut arena = arena(KvDtype::F16, 2);
        let mut angles = RopeAngles::default();
        angles.set(&[0.1; 16], &[0, 1], 1.0);
        let mut call = |angles: &RopeAngles, q: usize, k: usize, v: usize| {
            let args = HeadArgs {
                isa: Isa::detect(),
                layer: 0,
                rows: &rows,
                style: RopeStyle::Norm,
                angles,
                q_norm: None,
                k_norm: None,
                eps: 1e-5,
            };
            let (mut q, mut k, v) = (vec![0.0; q], vec![0.0; k], vec![0.0; v]);
            let heads = Heads {
                q: &mut q,
                k: &mut k,
                v: &v,
            };
            place_heads(
                &ThreadPool::new(1),
                &args,
                &mut KvView::of(&mut arena).unwrap(),
                heads,
            )
        };
        assert!(call(&angles, 256, 128, 128).is_ok());
        assert!(call(&angles, 255, 128, 128).is_err());
        assert!(call(&angles, 256, 127, 128).is_err());
        assert!(call(&angles, 256, 128, 129).is_err());
        let mut other = RopeAngles::default();
        other.set(&[0.1; 16], &[0], 1.0);
        assert!(call(&other, 256, 128, 128).is_err());
    }
}
