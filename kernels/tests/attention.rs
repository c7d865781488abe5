//! Paged attention against a dense one in 64-bit floats, and its promises: the same bits for any
//! chunking, batch, page table and number of threads; bad shapes refused with the numbers.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "test code with small numbers"
)]

use proptest::prelude::*;
use rootstock_kernels::{
    AttentionArgs, Isa, KernelError, KvRow, KvView, Scratch, ThreadPool, attention, store_kv,
};
use rootstock_memory::{
    KvArena, KvDtype, KvLayout, KvSide, KvSlot, LayoutOrder, LayoutSpec, PageId,
};

const DTYPES: [KvDtype; 3] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16];

/// One request's queries, keys and values in all layers' shape, and where its pages are.
struct Case {
    heads: u32,
    layout: KvLayout,
    len: u32,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

fn noise(seed: u64, len: usize, scale: f32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    (0..len).map(|_| next()).collect()
}

fn layout(kv_heads: u32, head_dim: u32, page_tokens: u32, dtype: KvDtype) -> KvLayout {
    let (order, layers) = (LayoutOrder::PageFirst, 2);
    KvLayout::new(LayoutSpec {
        order,
        page_tokens,
        layers,
        kv_heads,
        head_dim,
        dtype,
    })
    .unwrap()
}

impl Case {
    fn new(heads: u32, layout: KvLayout, len: u32, seed: u64) -> Self {
        let size = |heads: u32| (len * heads * layout.head_dim()) as usize;
        let kv = size(layout.kv_heads());
        let (q, k, v) = (
            noise(seed, size(heads), 2.0),
            noise(seed + 1, kv, 2.0),
            noise(seed + 2, kv, 1.0),
        );
        Self {
            heads,
            layout,
            len,
            q,
            k,
            v,
        }
    }

    fn pages_wanted(&self) -> u32 {
        self.len.div_ceil(self.layout.page_tokens())
    }

    /// A table whose pages are neither in order nor neighbours.
    fn scattered(&self) -> Vec<PageId> {
        let wanted = self.pages_wanted();
        (0..wanted)
            .map(|i| PageId::new(1 + 2 * (wanted - 1 - i)))
            .collect()
    }

    fn in_order(&self) -> Vec<PageId> {
        (1..=self.pages_wanted()).map(PageId::new).collect()
    }

    fn arena(&self) -> KvArena {
        let mut arena = KvArena::new(self.layout, 2 * self.pages_wanted() + 2).unwrap();
        // What a kernel must not read shows as NaN.
        arena.bytes_mut().fill(0xff);
        arena
    }

    /// Runs the request in chunks that end at `ends`, each storing its K and V first.
    fn chunked(&self, isa: Isa, threads: usize, pages: &[PageId], ends: &[u32]) -> Vec<f32> {
        let (mut arena, pool, mut scratch) =
            (self.arena(), ThreadPool::new(threads), Scratch::default());
        let mut out = vec![f32::NAN; self.q.len()];
        let mut start = 0;
        for &end in ends {
            let part = |x: &[f32], heads: u32| {
                let width = (heads * self.layout.head_dim()) as usize;
                x[start as usize * width..end as usize * width].to_vec()
            };
            let rows = [KvRow {
                first_pos: start,
                len: end - start,
                pages,
            }];
            let kv_heads = self.layout.kv_heads();
            let mut kv = KvView::of(&mut arena).unwrap();
            store_kv(
                isa,
                &mut kv,
                1,
                &rows,
                &part(&self.k, kv_heads),
                &part(&self.v, kv_heads),
            )
            .unwrap();
            let q = part(&self.q, self.heads);
            let args = AttentionArgs {
                isa,
                kv: &kv,
                layer: 1,
                heads: self.heads,
                scale: self.scale(),
                rows: &rows,
                q: &q,
            };
            let width = (self.heads * self.layout.head_dim()) as usize;
            let out = &mut out[start as usize * width..end as usize * width];
            attention(&pool, &args, out, &mut scratch).unwrap();
            start = end;
        }
        out
    }

    fn whole(&self, isa: Isa, threads: usize, pages: &[PageId]) -> Vec<f32> {
        self.chunked(isa, threads, pages, &[self.len])
    }

    fn scale(&self) -> f32 {
        1.0 / (self.layout.head_dim() as f32).sqrt()
    }

    /// Dense, in 64-bit floats, over K and V rounded as the arena rounds them.
    fn dense(&self, token: usize, head: usize) -> Vec<f64> {
        let round = |x: f32| match self.layout.dtype() {
            KvDtype::F32 => f64::from(x),
            KvDtype::F16 => half::f16::from_f32(x).to_f64(),
            KvDtype::Bf16 => half::bf16::from_f32(x).to_f64(),
        };
        let (heads, kv_heads) = (self.heads as usize, self.layout.kv_heads() as usize);
        let dim = self.layout.head_dim() as usize;
        let at = |x: &[f32], token: usize, heads: usize, head: usize| {
            x[(token * heads + head) * dim..][..dim].to_vec()
        };
        let q = at(&self.q, token, heads, head);
        let kv_head = head / (heads / kv_heads);
        let scores: Vec<f64> = (0..=token)
            .map(|key| {
                let k = at(&self.k, key, kv_heads, kv_head);
                let dot: f64 = q.iter().zip(k).map(|(q, k)| f64::from(*q) * round(k)).sum();
                dot * f64::from(self.scale())
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        (0..dim)
            .map(|d| {
                let value = |key: usize| round(self.v[(key * kv_heads + kv_head) * dim + d]);
                weights
                    .iter()
                    .enumerate()
                    .map(|(key, w)| w * value(key))
                    .sum::<f64>()
                    / total
            })
            .collect()
    }

    fn assert_close(&self, out: &[f32], what: &str) {
        let dim = self.layout.head_dim() as usize;
        for (index, out) in out.chunks(dim).enumerate() {
            let (token, head) = (index / self.heads as usize, index % self.heads as usize);
            // All of a short case, some and the last of a long one.
            if self.len > 20 && token % 13 != 0 && token + 3 < self.len as usize {
                continue;
            }
            for (found, expected) in out.iter().zip(self.dense(token, head)) {
                let error = (f64::from(*found) - expected).abs();
                assert!(
                    error <= 4e-6,
                    "{what}: token {token} head {head}: {found} {expected}"
                );
            }
        }
    }
}

#[test]
fn every_shape_agrees_with_dense_attention_cold_and_from_cached_pages() {
    for (seed, (heads, kv_heads)) in (0..).zip([(8, 8), (8, 2), (8, 1), (9, 3)]) {
        for head_dim in [64, 80, 96, 128, 256] {
            for page_tokens in [1, 16, 64, 256] {
                let dtype = DTYPES[(head_dim / 16 + page_tokens) as usize % 3];
                let layout = layout(kv_heads, head_dim, page_tokens, dtype);
                let case = Case::new(heads, layout, 35, seed);
                let pages = case.scattered();
                for isa in Isa::available() {
                    let what = format!(
                        "{} {heads}/{kv_heads} x {head_dim}, pages {page_tokens}",
                        isa.name()
                    );
                    let cold = case.whole(isa, 1, &pages);
                    case.assert_close(&cold, &what);
                    let warm = case.chunked(isa, 1, &pages, &[16, 34, 35]);
                    assert_eq!(cold, warm, "{what}");
                }
            }
        }
    }
}

#[test]
fn lengths_around_page_and_block_edges_agree_with_dense_attention() {
    for page_tokens in [1, 16, 64, 256] {
        for len in [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257] {
            let case = Case::new(
                3,
                layout(1, 64, page_tokens, KvDtype::F16),
                len,
                u64::from(len),
            );
            for isa in Isa::available() {
                let what = format!("{} length {len}, pages {page_tokens}", isa.name());
                let out = case.whole(isa, 2, &case.scattered());
                case.assert_close(&out, &what);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn chunks_tables_and_threads_change_no_bit(
        len in 1_u32..200, cuts in prop::collection::vec(1_u32..200, 0..6),
        page_log in 0_u32..7, dtype_index in 0_usize..3, seed in 0_u64..1000,
        (heads, kv_heads) in prop::sample::select(vec![(3, 3), (6, 2), (5, 1)]),
    ) {
        let layout = layout(kv_heads, 32, 1 << page_log, DTYPES[dtype_index]);
        let case = Case::new(heads, layout, len, seed);
        let mut ends: Vec<u32> = cuts.into_iter().filter(|cut| *cut < len).chain([len]).collect();
        ends.sort_unstable();
        ends.dedup();
        for isa in Isa::available() {
            let whole = case.whole(isa, 1, &case.in_order());
            prop_assert_eq!(&case.whole(isa, 2, &case.scattered()), &whole);
            prop_assert_eq!(&case.chunked(isa, 2, &case.scattered(), &ends), &whole);
        }
    }
}

#[test]
fn token_by_token_decode_equals_prefill() {
    let case = Case::new(9, layout(3, 64, 16, KvDtype::F16), 150, 5);
    let ends: Vec<u32> = (1..=case.len).collect();
    for isa in Isa::available() {
        let whole = case.whole(isa, 1, &case.in_order());
        assert_eq!(
            case.chunked(isa, 2, &case.scattered(), &ends),
            whole,
            "{}",
            isa.name()
        );
    }
}

#[test]
fn requests_in_one_step_do_not_see_each_other() {
    let layout = layout(2, 64, 16, KvDtype::Bf16);
    let cases = [
        Case::new(4, layout, 70, 1),
        Case::new(4, layout, 1, 2),
        Case::new(4, layout, 33, 3),
    ];
    for isa in Isa::available() {
        let mut arena = KvArena::new(layout, 40).unwrap();
        let mut next = 40;
        let tables: Vec<Vec<PageId>> = cases
            .iter()
            .map(|case| {
                let table = (0..case.pages_wanted())
                    .map(|i| PageId::new(next - i))
                    .collect();
                next -= case.pages_wanted();
                table
            })
            .collect();
        let rows: Vec<KvRow> = cases
            .iter()
            .zip(&tables)
            .map(|(case, pages)| KvRow {
                first_pos: 0,
                len: case.len,
                pages,
            })
            .collect();
        let concat =
            |f: &dyn Fn(&Case) -> &Vec<f32>| cases.iter().flat_map(f).copied().collect::<Vec<_>>();
        let q = concat(&|case| &case.q);
        let mut kv = KvView::of(&mut arena).unwrap();
        store_kv(
            isa,
            &mut kv,
            0,
            &rows,
            &concat(&|case| &case.k),
            &concat(&|case| &case.v),
        )
        .unwrap();
        let scale = cases[0].scale();
        let args = AttentionArgs {
            isa,
            kv: &kv,
            layer: 0,
            heads: 4,
            scale,
            rows: &rows,
            q: &q,
        };
        let mut out = vec![f32::NAN; q.len()];
        attention(
            &ThreadPool::new(2),
            &args,
            &mut out,
            &mut Scratch::default(),
        )
        .unwrap();
        let alone: Vec<f32> = cases
            .iter()
            .flat_map(|case| case.whole(isa, 1, &case.in_order()))
            .collect();
        assert_eq!(out, alone, "{}", isa.name());
    }
}

#[test]
fn an_infinite_value_reaches_no_earlier_token() {
    let mut case = Case::new(3, layout(1, 64, 16, KvDtype::F16), 40, 9);
    let clean: Vec<Vec<f32>> = Isa::available()
        .into_iter()
        .map(|isa| case.whole(isa, 1, &case.in_order()))
        .collect();
    case.v[21 * 64..22 * 64].fill(1e9);
    for (isa, clean) in Isa::available().into_iter().zip(clean) {
        let out = case.whole(isa, 1, &case.in_order());
        assert_eq!(out[..21 * 3 * 64], clean[..21 * 3 * 64], "{}", isa.name());
        assert!(
            out[21 * 3 * 64..].iter().all(|x| !x.is_finite()),
            "{}",
            isa.name()
        );
    }
}

#[test]
fn store_writes_its_slots_and_no_others() {
    for dtype in DTYPES {
        for isa in Isa::available() {
            let case = Case::new(2, layout(2, 16, 4, dtype), 7, 4);
            let pages = case.scattered();
            let mut arena = case.arena();
            let rows = [KvRow {
                first_pos: 0,
                len: 7,
                pages: &pages,
            }];
            let mut kv = KvView::of(&mut arena).unwrap();
            store_kv(isa, &mut kv, 1, &rows, &case.k, &case.v).unwrap();
            let written = arena.bytes().iter().filter(|byte| **byte != 0xff).count();
            assert!(written <= 7 * 2 * 2 * 16 * dtype.bytes() as usize);
            for (token, page) in (0..7).map(|t: u32| (t, pages[(t / 4) as usize])) {
                for (side, source) in [(KvSide::K, &case.k), (KvSide::V, &case.v)] {
                    for head in 0..2 {
                        let slot = KvSlot {
                            page,
                            layer: 1,
                            side,
                            head,
                            slot: token % 4,
                        };
                        let at = case.layout.element_offset(slot) as usize;
                        let value = source[((token * 2 + head) * 16) as usize];
                        let found = match dtype {
                            KvDtype::F32 => arena.as_f32().unwrap()[at],
                            KvDtype::F16 => arena.as_f16().unwrap()[at].to_f32(),
                            KvDtype::Bf16 => arena.as_bf16().unwrap()[at].to_f32(),
                        };
                        assert!(
                            (found - value).abs() <= 0.008 * value.abs(),
                            "{found} {value}"
                        );
                    }
                }
            }
        }
    }
}

/// A call with one row over an arena of 4 pages of 16 tokens.
fn call(heads: u32, kv_heads: u32, row: (u32, u32, &[u32]), layer: u32) -> Result<(), KernelError> {
    let layout = layout(kv_heads, 64, 16, KvDtype::F16);
    let mut arena = KvArena::new(layout, 3).unwrap();
    let pages: Vec<PageId> = row.2.iter().copied().map(PageId::new).collect();
    let rows = [KvRow {
        first_pos: row.0,
        len: row.1,
        pages: &pages,
    }];
    let q = vec![0.0; (row.1 * heads * 64) as usize];
    let mut out = q.clone();
    let kv = KvView::of(&mut arena).unwrap();
    let args = AttentionArgs {
        isa: Isa::detect(),
        kv: &kv,
        layer,
        heads,
        scale: 0.1,
        rows: &rows,
        q: &q,
    };
    attention(
        &ThreadPool::new(1),
        &args,
        &mut out,
        &mut Scratch::default(),
    )
}

#[test]
fn bad_shapes_are_refused_with_the_numbers() {
    let refused = |result: Result<(), KernelError>, numbers: &[&str]| {
        let text = result.unwrap_err().to_string();
        assert!(numbers.iter().all(|number| text.contains(number)), "{text}");
    };
    call(4, 2, (0, 17, &[1, 2]), 0).unwrap();
    refused(call(33, 2, (0, 1, &[1]), 0), &["33", "2"]);
    refused(call(3, 2, (0, 1, &[1]), 0), &["3", "2"]);
    refused(call(0, 2, (0, 1, &[1]), 0), &["0", "2"]);
    refused(call(4, 2, (0, 17, &[1]), 0), &["17", "16", "2", "1"]);
    refused(call(4, 2, (u32::MAX, 2, &[1]), 0), &["4294967297"]);
    refused(call(4, 2, (0, 1, &[4]), 0), &["page 4", "4 pages"]);
    refused(call(4, 2, (0, 1, &[1]), 2), &["layer 2", "2 layers"]);
}

#[test]
fn layouts_no_kernel_reads_are_refused() {
    let mut bytes = vec![0_u64; 1 << 16];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut bytes);
    let odd = layout(1, 72, 16, KvDtype::F16);
    assert!(
        KvView::new(bytes, odd)
            .unwrap_err()
            .to_string()
            .contains("72")
    );
    let wide = layout(1, 272, 16, KvDtype::F16);
    assert!(
        KvView::new(bytes, wide)
            .unwrap_err()
            .to_string()
            .contains("272")
    );
    let good = layout(1, 64, 16, KvDtype::F16);
    let spec = LayoutSpec {
        order: LayoutOrder::LayerFirst,
        ..good.spec()
    };
    assert!(matches!(
        KvView::new(bytes, KvLayout::new(spec).unwrap()),
        Err(KernelError::LayoutOrder)
    ));
    assert!(KvView::new(&mut bytes[..good.page_bytes()], good).is_ok());
    assert!(KvView::new(&mut bytes[..good.page_bytes() - 2], good).is_err());
    assert!(KvView::new(&mut bytes[1..=good.page_bytes()], good).is_err());
}

#[test]
fn queries_of_another_length_are_refused() {
    let layout = layout(1, 64, 16, KvDtype::F16);
    let mut arena = KvArena::new(layout, 3).unwrap();
    let pages = [PageId::new(1)];
    let rows = [KvRow {
        first_pos: 0,
        len: 2,
        pages: &pages,
    }];
    let mut kv = KvView::of(&mut arena).unwrap();
    let (k, short) = (vec![0.0; 128], vec![0.0; 127]);
    assert!(store_kv(Isa::detect(), &mut kv, 0, &rows, &k, &short).is_err());
    assert!(store_kv(Isa::detect(), &mut kv, 0, &rows, &short, &k).is_err());
    assert!(store_kv(Isa::detect(), &mut kv, 0, &rows, &k, &k).is_ok());
    let args = AttentionArgs {
        isa: Isa::detect(),
        kv: &kv,
        layer: 0,
        heads: 1,
        scale: 1.0,
        rows: &rows,
        q: &short,
    };
    let pool = ThreadPool::new(1);
    assert!(attention(&pool, &args, &mut k.clone(), &mut Scratch::default()).is_err());
    let args = AttentionArgs { q: &k, ..args };
    assert!(attention(&pool, &args, &mut short.clone(), &mut Scratch::default()).is_err());
    let empty = AttentionArgs {
        rows: &[],
        q: &[],
        ..args
    };
    assert!(attention(&pool, &empty, &mut [], &mut Scratch::default()).is_ok());
}

#[test]
fn offsets_past_32_bits_do_not_wrap() {
    let layout = layout(8, 128, 256, KvDtype::F16);
    let page = PageId::new(100_000);
    let slot = KvSlot {
        page,
        layer: 1,
        side: KvSide::V,
        head: 7,
        slot: 255,
    };
    let page_elements = 2 * 2 * 8 * 256 * 128_u64;
    let expected = 100_000 * page_elements + page_elements - 128;
    assert!(expected > 1 << 31);
    assert_eq!(layout.element_offset(slot), expected);
}
