//! What a step on the CPU asks of the allocator once it has run before: the answer, and nothing
//! for each layer, position or output.

#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

#[path = "support/tiny.rs"]
mod tiny;

use std::alloc::System;
use std::sync::Arc;

use cap::Cap;
use rootstock::Backend;
use rootstock::memory::StepId;
use rootstock::scheduler::RowOut;
use rootstock_engine::cpu_backend::{CpuBackend, CpuBackendConfig};
use rootstock_engine::model::Model;
use rootstock_kernels::Isa;
use tiny::Part;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

const PAGE_TOKENS: u32 = 16;
const PAGES: u32 = 4;

fn backend(threads: usize) -> CpuBackend {
    let model = Model::load(&tiny::file("llama"), Isa::detect(), threads).unwrap();
    let config = CpuBackendConfig {
        pages: 1 + 16 * PAGES,
        page_tokens: PAGE_TOKENS,
        threads,
        ..CpuBackendConfig::default()
    };
    CpuBackend::new(Arc::new(model), &config, None).unwrap()
}

/// Bytes that step `id` asks for, its plan not among them: `len` tokens each of `rows` requests
/// from `position` on.
fn asked(backend: &mut CpuBackend, id: u64, rows: u32, position: u32, len: u32) -> usize {
    let tables: Vec<Vec<u32>> = (0..rows)
        .map(|row| (1 + row * PAGES..1 + (row + 1) * PAGES).collect())
        .collect();
    let tokens = vec![5; len as usize];
    let pages = ((position + len - 1) / PAGE_TOKENS + 1) as usize;
    let parts: Vec<Part<'_>> = tables
        .iter()
        .map(|table| Part::new(&tokens, position, &table[..pages]).greedy(position))
        .collect();
    let plan = tiny::plan(id, &parts);
    let before = ALLOCATOR.total_allocated();
    backend.launch(plan).unwrap();
    let output = backend.wait(StepId(id)).unwrap();
    let bytes = ALLOCATOR.total_allocated() - before;
    assert_eq!(output.rows.len(), rows as usize);
    bytes
}

#[test]
fn a_step_like_one_before_asks_for_its_answer_alone() {
    for threads in [1, 2] {
        let mut backend = backend(threads);
        for (rows, len) in [(1, 1), (4, 1), (16, 1), (4, 16)] {
            let answer = rows as usize * size_of::<RowOut>();
            let more: Vec<(u32, usize)> = (0..PAGES * PAGE_TOKENS / len)
                .map(|step| {
                    let id = u64::from(rows * 10_000 + len * 1000 + step);
                    let bytes = asked(&mut backend, id, rows, step * len, len);
                    (step, bytes - answer)
                })
                .filter(|&(_, bytes)| bytes > 0)
                .collect();
            // Room for the scores, twice for what was drawn, and once for each thread.
            assert!(
                more.len() <= 3 + threads,
                "threads {threads}, {rows} rows of {len}: step and bytes {more:?}"
            );
        }
    }
}
