//! Tiny seeded models in memory, the same that `data/make_tiny.py` computes golden logits of, and
//! plans for a backend without a scheduler.
#![allow(dead_code, reason = "each test binary uses its own part")]
#![expect(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "shared by test binaries, with small numbers"
)]

use std::sync::Arc;

use rootstock::memory::{PageId, ReplicaId, StepId};
use rootstock::radix::{CacheConfig, NamespaceId, NamespaceKey, PrefixCache, Token};
use rootstock::scheduler::{RequestId, Row, RowInput, SampleSpec, SamplingParams, StepPlan};
use rootstock_engine::gguf::{Gguf, GgufWriter, TensorType};

pub const VOCAB: usize = 304;
pub const DIM: usize = 64;
pub const FFN: usize = 96;
pub const LAYERS: usize = 2;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const POSITIONS: usize = 40;

/// Families with golden logits.
pub const FAMILIES: [&str; 3] = ["llama", "qwen2", "qwen3"];

fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn values(name: &str, len: usize) -> Vec<f32> {
    let seed = name.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
    });
    let scaled = |u: f64| match name {
        "rope_freqs.weight" => 2.0 + u,
        _ if name.ends_with("norm.weight") => 1.0 + 0.25 * u,
        "token_embd.weight" => u,
        _ if name.ends_with(".bias") => 0.5 * u,
        _ => 0.25 * u,
    };
    (0..len as u64)
        .map(|index| {
            let bits = mix(seed.wrapping_add(index)) >> 40;
            scaled(bits as f64 / f64::from(1 << 23) - 1.0) as f32
        })
        .collect()
}

/// The writer of a tiny model; tests may add to it or leave things out.
pub fn writer(family: &str, skip: &[&str]) -> GgufWriter {
    let floats = |values: &[f32]| {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        (TensorType::F32, bytes.collect())
    };
    writer_of(family, skip, &floats)
}

/// A matrix in some type of a file.
pub type Encoded = (TensorType, Vec<u8>);

/// The same, with matrices in another type.
pub fn writer_of(family: &str, skip: &[&str], matrix: &dyn Fn(&[f32]) -> Encoded) -> GgufWriter {
    let head_dim = if family == "qwen3" { 32 } else { DIM / HEADS };
    let key = |name: &str| format!("{family}.{name}");
    let mut file = GgufWriter::new()
        .text("general.architecture", family)
        .text("general.name", "tiny")
        .int(&key("block_count"), LAYERS as u32)
        .int(&key("embedding_length"), DIM as u32)
        .int(&key("feed_forward_length"), FFN as u32)
        .int(&key("attention.head_count"), HEADS as u32)
        .int(&key("attention.head_count_kv"), KV_HEADS as u32)
        .int(&key("attention.key_length"), head_dim as u32)
        .int(&key("context_length"), 2048_u32)
        .float(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .float(&key("rope.freq_base"), 10000.0);
    let scaling = match family {
        "qwen2" => Some("linear"),
        "qwen3" => Some("yarn"),
        _ => None,
    };
    if let Some(scaling) = scaling {
        file = file
            .text(&key("rope.scaling.type"), scaling)
            .float(&key("rope.scaling.factor"), 4.0)
            .int(&key("rope.scaling.original_context_length"), 1024_u32);
    }
    for (name, shape) in tensors(family, head_dim) {
        if !skip.contains(&name.as_str()) {
            let len = shape.iter().product();
            let dims: Vec<u64> = shape.iter().rev().map(|&dim| dim as u64).collect();
            let values = values(&name, len);
            file = if dims.len() == 2 {
                let (ty, bytes) = matrix(&values);
                file.tensor(&name, &dims, ty, bytes)
            } else {
                file.tensor_f32(&name, &dims, &values)
            };
        }
    }
    file
}

/// Names with shapes, outermost first.
fn tensors(family: &str, head_dim: usize) -> Vec<(String, Vec<usize>)> {
    let mut all = vec![
        ("token_embd.weight".to_owned(), vec![VOCAB, DIM]),
        ("output_norm.weight".to_owned(), vec![DIM]),
    ];
    match family {
        "llama" => all.push(("rope_freqs.weight".to_owned(), vec![head_dim / 2])),
        "qwen3" => all.push(("output.weight".to_owned(), vec![VOCAB, DIM])),
        _ => {}
    }
    for layer in 0..LAYERS {
        let mut add = |part: &str, shape: &[usize]| {
            all.push((format!("blk.{layer}.{part}"), shape.to_vec()));
        };
        add("attn_norm.weight", &[DIM]);
        add("ffn_norm.weight", &[DIM]);
        add("attn_q.weight", &[HEADS * head_dim, DIM]);
        add("attn_k.weight", &[KV_HEADS * head_dim, DIM]);
        add("attn_v.weight", &[KV_HEADS * head_dim, DIM]);
        add("attn_output.weight", &[DIM, HEADS * head_dim]);
        add("ffn_gate.weight", &[FFN, DIM]);
        add("ffn_up.weight", &[FFN, DIM]);
        add("ffn_down.weight", &[DIM, FFN]);
        if family == "qwen2" {
            add("attn_q.bias", &[HEADS * head_dim]);
            add("attn_k.bias", &[KV_HEADS * head_dim]);
            add("attn_v.bias", &[KV_HEADS * head_dim]);
        }
        if family == "qwen3" {
            add("attn_q_norm.weight", &[head_dim]);
            add("attn_k_norm.weight", &[head_dim]);
        }
    }
    all
}

/// A tiny model as a file in memory.
pub fn file(family: &str) -> Gguf {
    Gguf::from_bytes(writer(family, &[]).to_bytes()).unwrap()
}

/// The tokens that golden logits were computed for.
pub fn tokens() -> Vec<Token> {
    (0..POSITIONS as u32)
        .map(|i| (i * 37 + 11) % VOCAB as u32)
        .collect()
}

/// One row of a hand-made plan.
pub struct Part<'a> {
    pub tokens: &'a [Token],
    pub first_pos: u32,
    pub pages: &'a [u32],
    pub sample: Option<SamplingParams>,
    pub output_index: u32,
    pub input: RowInput,
}

impl<'a> Part<'a> {
    pub fn new(tokens: &'a [Token], first_pos: u32, pages: &'a [u32]) -> Self {
        Self {
            tokens,
            first_pos,
            pages,
            sample: None,
            output_index: 0,
            input: RowInput::Known,
        }
    }

    pub fn greedy(self, output_index: u32) -> Self {
        Self {
            sample: Some(SamplingParams::greedy()),
            output_index,
            ..self
        }
    }

    pub fn after(self, step: u64, row: u32) -> Self {
        Self {
            input: RowInput::FromStep {
                step: StepId(step),
                row,
            },
            ..self
        }
    }
}

/// Some namespace; only a cache makes one.
fn namespace() -> NamespaceId {
    let config = CacheConfig {
        device_pages: vec![1],
        ..CacheConfig::default()
    };
    let key = NamespaceKey {
        model: "tiny".into(),
        numerics: "any".into(),
        lora: None,
        salt: None,
    };
    PrefixCache::new(&config).unwrap().namespace(&key).unwrap()
}

/// A plan of these rows.
pub fn plan(id: u64, parts: &[Part<'_>]) -> StepPlan {
    let mut plan = StepPlan {
        id: StepId(id),
        replica: ReplicaId(0),
        rows: Vec::new(),
        tokens: Vec::new(),
        page_tables: Vec::new(),
        copies: Vec::new(),
        after: Vec::new(),
        overtakes: false,
    };
    let ns = namespace();
    for (index, part) in parts.iter().enumerate() {
        let tokens = plan.tokens.len() as u32;
        let pages = plan.page_tables.len() as u32;
        plan.tokens.extend_from_slice(part.tokens);
        plan.page_tables
            .extend(part.pages.iter().map(|&page| PageId::new(page)));
        let len = part.tokens.len() as u32;
        plan.rows.push(Row {
            request: RequestId(index as u64 + 1),
            ns,
            tokens: tokens..tokens + len,
            input: part.input,
            first_pos: part.first_pos,
            len,
            pages: pages..pages + part.pages.len() as u32,
            sample: part.sample.clone().map(|params| SampleSpec {
                params: Arc::new(params),
                output_index: part.output_index,
                suppress: None,
                history: None,
            }),
            drafts: 0,
            guesses: tokens + len..tokens + len,
            mask: None,
        });
    }
    plan
}
