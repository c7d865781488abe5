//! Model files made on the spot: a byte-level vocabulary with a few merges, a chat template, and
//! on demand the weights of a small random Llama.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use rootstock_engine::gguf::{GgufWriter, Value};
use rootstock_engine::tokenizer::byte_alphabet;

/// Token ids of the vocabulary beyond the 256 bytes, which are their own ids; 256 is "DE".
pub(crate) const DEF: u32 = 257;
pub(crate) const HI: u32 = 258;
pub(crate) const IM_START: u32 = 259;
pub(crate) const IM_END: u32 = 260;
pub(crate) const VOCAB: u32 = 261;

/// As ChatML, without a default system message.
const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

const NORMAL: i64 = 1;
const CONTROL: i64 = 3;

const DIM: usize = 64;
const FFN: usize = 128;
const LAYERS: usize = 2;
const KV_WIDTH: usize = 32;

/// Positions of the tiny model.
pub(crate) const CONTEXT: u32 = 4096;

/// A model file in the temporary folder, removed at the end.
#[derive(Debug)]
pub(crate) struct TinyModel {
    pub(crate) path: PathBuf,
}

impl TinyModel {
    /// Vocabulary and template alone, for backends that need no weights.
    pub(crate) fn without_weights() -> TinyModel {
        write(header(TEMPLATE))
    }

    /// The same with another template.
    pub(crate) fn with_template(template: &str) -> TinyModel {
        write(header(template))
    }

    /// With the weights of a random Llama: 2 layers, 64 dimensions, 4 heads on 2 KV heads.
    pub(crate) fn with_weights() -> TinyModel {
        write(weights(header(TEMPLATE)))
    }
}

impl Drop for TinyModel {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.path));
    }
}

fn write(writer: GgufWriter) -> TinyModel {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("rootstock-tiny-{}-{number}.gguf", std::process::id());
    let path = std::env::temp_dir().join(name);
    writer.write(&path).unwrap();
    TinyModel { path }
}

fn header(template: &str) -> GgufWriter {
    let mut tokens = byte_alphabet();
    tokens.extend(["DE", "DEF", "HI", "<|im_start|>", "<|im_end|>"].map(str::to_owned));
    let mut kinds = vec![NORMAL; tokens.len()];
    kinds[IM_START as usize] = CONTROL;
    kinds[IM_END as usize] = CONTROL;
    GgufWriter::new()
        .text("general.architecture", "llama")
        .text("general.name", "tiny")
        .int("llama.block_count", i32::try_from(LAYERS).unwrap())
        .int("llama.context_length", CONTEXT)
        .int("llama.embedding_length", i32::try_from(DIM).unwrap())
        .int("llama.feed_forward_length", i32::try_from(FFN).unwrap())
        .int("llama.attention.head_count", 4)
        .int("llama.attention.head_count_kv", 2)
        .int("llama.rope.dimension_count", 16)
        .int("llama.vocab_size", VOCAB)
        .float("llama.rope.freq_base", 10_000.0)
        .float("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "smollm")
        .texts("tokenizer.ggml.tokens", &tokens)
        .value("tokenizer.ggml.token_type", Value::Ints(kinds))
        .texts("tokenizer.ggml.merges", ["D E", "DE F", "H I"])
        .int("tokenizer.ggml.bos_token_id", IM_START)
        .int("tokenizer.ggml.eos_token_id", IM_END)
        .value("tokenizer.ggml.add_bos_token", Value::Bool(false))
        .text("tokenizer.chat_template", template)
}

fn weights(mut writer: GgufWriter) -> GgufWriter {
    let mut seed = 0x2545_F491_4F6C_DD1D_u64;
    let mut random = |count: usize, scale: f32| -> Vec<f32> {
        (0..count)
            .map(|_| {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                ((seed >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
            })
            .collect()
    };
    let mut matrix = |writer: GgufWriter, name: &str, rows: usize, cols: usize| {
        let values = random(rows * cols, 1.7 / (cols as f32).sqrt());
        writer.tensor_f32(name, &[cols as u64, rows as u64], &values)
    };
    writer = matrix(writer, "token_embd.weight", VOCAB as usize, DIM);
    writer = matrix(writer, "output.weight", VOCAB as usize, DIM);
    for layer in 0..LAYERS {
        let parts = [
            ("attn_q", DIM, DIM),
            ("attn_k", KV_WIDTH, DIM),
            ("attn_v", KV_WIDTH, DIM),
            ("attn_output", DIM, DIM),
            ("ffn_gate", FFN, DIM),
            ("ffn_up", FFN, DIM),
            ("ffn_down", DIM, FFN),
        ];
        for (part, rows, cols) in parts {
            writer = matrix(writer, &format!("blk.{layer}.{part}.weight"), rows, cols);
        }
        for norm in ["attn_norm", "ffn_norm"] {
            let name = format!("blk.{layer}.{norm}.weight");
            writer = writer.tensor_f32(&name, &[DIM as u64], &[1.0; DIM]);
        }
    }
    writer.tensor_f32("output_norm.weight", &[DIM as u64], &[1.0; DIM])
}
