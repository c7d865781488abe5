//! Writes the logits of all positions of a reference file, for `tests/reference` to compare.
//!
//! ```text
//! cargo run --release -p rootstock-engine --example logits -- \
//!     MODEL.gguf tests/reference/smollm2.ref OUT.f32 [auto|avx512|avx2|scalar] [f32|f16|bf16]
//! ```
//! Only the tokens of the reference are used; the output is little-endian f32
//! `[positions][vocab]`, sequence after sequence, each computed as one cold prefill.

#[path = "../tests/support/reference.rs"]
mod reference;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use rootstock::memory::{KvDtype, PageId};
use rootstock_engine::cpu_backend::{CpuBackend, CpuBackendConfig};
use rootstock_engine::gguf::Gguf;
use rootstock_engine::model::Model;
use rootstock_kernels::{Isa, KvRow};

type AnyError = Box<dyn std::error::Error>;

fn main() -> Result<(), AnyError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, reference, out, rest @ ..] = args.as_slice() else {
        return Err("usage: logits MODEL.gguf REFERENCE OUT.f32 [isa] [kv dtype]".into());
    };
    let isa = Isa::parse(rest.first().map_or("auto", String::as_str))?;
    let kv_dtype = match rest.get(1).map_or("f16", String::as_str) {
        "f32" => KvDtype::F32,
        "f16" => KvDtype::F16,
        "bf16" => KvDtype::Bf16,
        other => return Err(format!("kv dtype {other:?}, wanted f32, f16 or bf16").into()),
    };
    let file = Gguf::open(Path::new(model))?;
    let config = CpuBackendConfig {
        pages: 512,
        kv_dtype,
        ..CpuBackendConfig::default()
    };
    let model = Model::load(&file, isa, config.threads)?;
    let mut backend = CpuBackend::new(Arc::new(model), &config, None)?;
    let mut sink = std::io::BufWriter::new(std::fs::File::create(out)?);
    let mut logits = Vec::new();
    let bytes = std::fs::read(reference)?;
    for sequence in reference::read(&bytes).ok_or("not a reference file")? {
        let tokens = sequence.tokens;
        logits.clear();
        let len = u32::try_from(tokens.len())?;
        let pages: Vec<PageId> = (1..=len.div_ceil(16)).map(PageId::new).collect();
        backend.logits(
            &tokens,
            KvRow {
                first_pos: 0,
                len,
                pages: &pages,
            },
            &mut logits,
        )?;
        sink.write_all(bytemuck::cast_slice(&logits))?;
    }
    Ok(sink.flush()?)
}
