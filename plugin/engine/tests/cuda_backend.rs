//! The engine on the mock driver: CPU's text token for token on the tiny models, tiers and pins
//! included; draws on the device and on the host; every call made to fail in turn.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "helpers of tests, with small numbers"
)]

#[path = "../../../kernels/tests/cuda/mock.rs"]
mod mock;
#[path = "support/tiny.rs"]
mod tiny;

use std::sync::Arc;
use std::time::Duration;

use mock::{Mock, Variant, on_mock};
use rootstock::memory::{KvDtype, PageId, StepId};
use rootstock::radix::{CacheStats, Ttl, WritePolicy};
use rootstock::scheduler::{SamplingParams, Usage};
use rootstock::{Backend, StepError};
use rootstock_engine::cpu_backend::{CpuBackend, CpuBackendConfig};
use rootstock_engine::cuda_backend::{CudaBackend, CudaBackendConfig, CudaModel};
use rootstock_engine::model::Model;
use rootstock_engine::service::{
    DeviceChoice, EightBits, Event, Service, ServiceConfig, Submission,
};
use rootstock_kernels::cuda::{Device, KvFormat, Numerics};
use rootstock_kernels::{Isa, KvRow};
use tiny::{Part, VOCAB, plan, tokens};

const ENGINE: Variant = Variant {
    head_dims: &[16, 32],
    kv_types: &[0, 1, 2, 3, 4],
    sanitized: false,
    fault: None,
};

fn on_cuda(family: &str, kv_dtype: KvDtype, numerics: Numerics, in_flight: u8) -> CudaBackend {
    let device = Device::open(0).unwrap();
    let model = CudaModel::load(&tiny::file(family), &device, None, None).unwrap();
    let config = CudaBackendConfig {
        pages: 64,
        kv_format: KvFormat::of(kv_dtype),
        max_in_flight: in_flight,
        numerics,
        ..CudaBackendConfig::default()
    };
    CudaBackend::new(model, &config, None).unwrap()
}

fn on_cpu(family: &str, kv_dtype: KvDtype) -> CpuBackend {
    let model = Model::load(&tiny::file(family), Isa::Scalar, 1).unwrap();
    let config = CpuBackendConfig {
        pages: 64,
        kv_dtype,
        threads: 1,
        ..CpuBackendConfig::default()
    };
    CpuBackend::new(Arc::new(model), &config, None).unwrap()
}

/// Whether there is time to make each call fail, not one in some (`EVERY_CALL=1`).
fn every_call() -> bool {
    std::env::var_os("EVERY_CALL").is_some()
}

fn largest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |most, d| if d <= most { most } else { d })
}

#[test]
fn logits_of_every_family_are_those_of_the_cpu() {
    if !on_mock("logits_of_every_family_are_those_of_the_cpu", &ENGINE) {
        return;
    }
    for family in tiny::FAMILIES {
        for (dtype, numerics, bound) in [
            (KvDtype::F32, Numerics::Fast, 1e-4),
            (KvDtype::F16, Numerics::Invariant, 1e-2),
            (KvDtype::F16, Numerics::Fast, 5e-2),
            (KvDtype::Bf16, Numerics::Fast, 0.4),
        ] {
            let pages: Vec<PageId> = [3, 1, 2].map(PageId::new).into();
            let row = || KvRow {
                first_pos: 0,
                len: 40,
                pages: &pages,
            };
            let (mut here, mut there) = (Vec::new(), Vec::new());
            on_cpu(family, dtype)
                .logits(&tokens(), row(), &mut here)
                .unwrap();
            let mut cuda = on_cuda(family, dtype, numerics, 1);
            cuda.logits(&tokens(), row(), &mut there).unwrap();
            let off = largest(&here, &there);
            println!("    {family} {dtype:?} {numerics:?}: largest logit difference {off:.1e}");
            assert!(off <= bound, "{family} {dtype:?} {numerics:?}: {off}");
        }
    }
}

/// Texts of prompts that run together, each on its own pages. Where the backend takes two steps in
/// flight, each is launched before the one before it is waited for, and continues from its draws.
fn texts(backend: &mut dyn Backend, samples: &[SamplingParams], outputs: u64) -> Vec<Vec<u32>> {
    let depth = u64::from(backend.caps().max_in_flight);
    let rows = 0..samples.len() as u32;
    let prompts: Vec<Vec<u32>> = rows
        .clone()
        .map(|row| {
            let tokens = 0..9 + 7 * row;
            tokens
                .map(|i| (i * 31 + row * 17 + 5) % VOCAB as u32)
                .collect()
        })
        .collect();
    let pages: Vec<Vec<u32>> = rows
        .map(|row| (row * 5 + 1..row * 5 + 6).collect())
        .collect();
    let mut drawn: Vec<Vec<u32>> = vec![Vec::new(); samples.len()];
    for id in 1..outputs + depth {
        if id <= outputs {
            let last: Vec<[u32; 1]> = drawn
                .iter()
                .map(|text| [text.last().copied().unwrap_or(0)])
                .collect();
            let parts = prompts.iter().enumerate().map(|(row, prompt)| {
                let first_pos = prompt.len() as u32 + id as u32 - 2;
                let part = match (id, depth) {
                    (1, _) => Part::new(prompt, 0, &pages[row]),
                    (_, 1) => Part::new(&last[row], first_pos, &pages[row]),
                    _ => Part::new(&[0], first_pos, &pages[row]).after(id - 1, row as u32),
                };
                Part {
                    sample: Some(samples[row].clone()),
                    output_index: id as u32 - 1,
                    ..part
                }
            });
            let parts: Vec<Part<'_>> = parts.collect();
            backend.launch(plan(id, &parts)).unwrap();
        }
        if id >= depth {
            let output = backend.wait(StepId(id + 1 - depth)).unwrap();
            for (row, text) in output.rows.iter().zip(&mut drawn) {
                text.extend_from_slice(&row.accepted);
            }
        }
    }
    drawn
}

fn ways_to_draw() -> Vec<SamplingParams> {
    let greedy = SamplingParams::greedy();
    let warm = SamplingParams {
        temperature: 0.8,
        top_p: 0.9,
        top_k: 40,
        seed: 7,
        ..greedy.clone()
    };
    vec![
        greedy.clone(),
        warm.clone(),
        // What only the host draws.
        SamplingParams {
            logprobs: Some(2),
            ..greedy
        },
        SamplingParams {
            logit_bias: vec![(5, 3.0)],
            ..warm
        },
    ]
}

#[test]
fn texts_are_those_of_the_cpu_with_one_and_two_steps_in_flight() {
    if !on_mock(
        "texts_are_those_of_the_cpu_with_one_and_two_steps_in_flight",
        &ENGINE,
    ) {
        return;
    }
    for family in tiny::FAMILIES {
        let samples = ways_to_draw();
        let expected = texts(&mut on_cpu(family, KvDtype::F32), &samples, 6);
        assert!(expected.iter().all(|text| text.len() == 6));
        for (in_flight, numerics) in [
            (1, Numerics::Fast),
            (2, Numerics::Fast),
            (2, Numerics::Invariant),
        ] {
            let mut cuda = on_cuda(family, KvDtype::F32, numerics, in_flight);
            let found = texts(&mut cuda, &samples, 6);
            assert_eq!(found, expected, "{family} {numerics:?} {in_flight}");
        }
    }
}

#[test]
fn a_plan_that_is_wrong_fails_and_the_next_one_runs() {
    if !on_mock("a_plan_that_is_wrong_fails_and_the_next_one_runs", &ENGINE) {
        return;
    }
    let mut cuda = on_cuda("llama", KvDtype::F32, Numerics::Fast, 1);
    let bad = [
        Part::new(&[VOCAB as u32], 0, &[1]),
        Part::new(&[1], 0, &[65]),
        Part::new(&[1, 2], 15, &[1]),
    ];
    for (id, part) in (1..).zip(bad) {
        let error = cuda.launch(plan(id, &[part])).unwrap_err();
        assert!(matches!(error, StepError::Failed { .. }), "{error}");
    }
    cuda.launch(plan(9, &[Part::new(&[1], 0, &[1]).greedy(0)]))
        .unwrap();
    let full = cuda
        .launch(plan(10, &[Part::new(&[1], 0, &[2])]))
        .unwrap_err();
    assert!(matches!(full, StepError::Full { .. }), "{full}");
    assert!(matches!(
        cuda.wait(StepId(10)),
        Err(StepError::NotInFlight { .. })
    ));
    assert_eq!(cuda.wait(StepId(9)).unwrap().rows[0].accepted.len(), 1);
}

fn config(device: DeviceChoice) -> ServiceConfig {
    ServiceConfig {
        device,
        device_pages: Some(16),
        host_pages: Some(64),
        write_policy: WritePolicy::Through,
        free_copies: true,
        kv_dtype: KvDtype::F32,
        isa: Some(Isa::Scalar),
        page_size: 4,
        threads: Some(1),
        ..ServiceConfig::default()
    }
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len)
        .map(|i| (seed * 101 + i * i * 7 + i) % VOCAB as u32)
        .collect()
}

/// The text, None when the request failed, and what it cost.
fn ask(service: &Service, submission: Submission) -> (Option<Vec<u32>>, Usage) {
    let ticket = service.submit(submission).unwrap();
    let mut drawn = Vec::new();
    for event in ticket.events.iter() {
        match event {
            Event::Started { .. } => {}
            Event::Tokens { tokens, .. } => drawn.extend(tokens),
            Event::Final { usage, .. } => {
                let whole = drawn.len() == 4;
                return (whole.then_some(drawn), usage);
            }
        }
    }
    panic!("the channel closed without a final event");
}

fn until(service: &Service, state: impl Fn(&CacheStats) -> bool) {
    for _ in 0..30_000 {
        if state(&service.stats().core.unwrap().cache) {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    panic!("{:?}", service.stats().core.unwrap().cache);
}

#[test]
fn the_service_says_the_same_on_cuda_with_tiers_and_pins() {
    if !on_mock(
        "the_service_says_the_same_on_cuda_with_tiers_and_pins",
        &ENGINE,
    ) {
        return;
    }
    let run = |device| {
        let service = Service::start(&tiny::file("qwen3"), config(device)).unwrap();
        let mut first = Submission::new(prompt(1, 30), 4);
        let ttl = Ttl {
            seconds: 600,
            clamped: false,
        };
        first.hints.pins.push((u32::MAX, ttl));
        let mut texts = vec![ask(&service, first).0];
        for seed in 2..10 {
            texts.push(ask(&service, Submission::new(prompt(seed, 17 + seed), 4)).0);
        }
        until(&service, |cache| cache.copies_under_way == 0);
        let (again, usage) = ask(&service, Submission::new(prompt(1, 30), 4));
        assert_eq!(again, texts[0], "{device:?}");
        assert!(usage.cached.host > 0, "{device:?}: {usage:?}");
        assert_eq!(usage.cached.total(), 28, "{device:?}: {usage:?}");
        texts.push(again);
        let core = service.stats().core.unwrap();
        assert_eq!(core.cache.copies_failed, 0, "{device:?}");
        // Layer by layer, under the prefill.
        let begun = core.schedulers[0].begun_in_transit;
        assert_eq!(
            begun > 0,
            device != DeviceChoice::Cpu,
            "{device:?}: {begun}"
        );
        assert!(texts.iter().all(Option::is_some), "{device:?}");
        texts
    };
    assert_eq!(run(DeviceChoice::Cuda(0)), run(DeviceChoice::Cpu));
}

#[test]
fn pages_of_eight_bits_come_back_from_host_as_they_went() {
    if !on_mock(
        "pages_of_eight_bits_come_back_from_host_as_they_went",
        &ENGINE,
    ) {
        return;
    }
    for (kind, name) in [(EightBits::E4m3, "e4m3"), (EightBits::Int8, "int8")] {
        let with = |device| ServiceConfig {
            kv_eight_bits: Some(kind),
            ..config(device)
        };
        let service = Service::start(&tiny::file("llama"), with(DeviceChoice::Cuda(0))).unwrap();
        let numerics = &service.model_info().numerics_id;
        assert_eq!(*numerics, format!("cuda3-sm80-fast-lt120900/kv-{name}"));
        let texts: Vec<_> = (1..10)
            .map(|seed| ask(&service, Submission::new(prompt(seed, 17 + seed), 4)).0)
            .collect();
        until(&service, |cache| cache.copies_under_way == 0);
        let (again, usage) = ask(&service, Submission::new(prompt(1, 18), 4));
        assert!(again.is_some() && again == texts[0], "{name}");
        assert!(usage.cached.host > 0, "{name}: {usage:?}");
        let refused = Service::start(&tiny::file("llama"), with(DeviceChoice::Cpu));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("f32, f16 or bf16"), "{refused}");
    }
}

#[test]
fn auto_takes_the_devices_and_each_replica_has_its_own() {
    if !on_mock(
        "auto_takes_the_devices_and_each_replica_has_its_own",
        &ENGINE,
    ) {
        return;
    }
    let numerics = |device, replicas| {
        let config = ServiceConfig {
            replicas,
            ..config(device)
        };
        Service::start(&tiny::file("llama"), config).map(|it| it.model_info().numerics_id.clone())
    };
    // The mock has two devices.
    assert_eq!(
        numerics(DeviceChoice::Auto, 2).unwrap(),
        "cuda3-sm80-fast-lt120900/kv-f32"
    );
    assert!(!numerics(DeviceChoice::Auto, 3).unwrap().starts_with("cuda"));
    let error = numerics(DeviceChoice::Cuda(1), 2).unwrap_err().to_string();
    assert!(error.starts_with("no CUDA device: number 2"), "{error}");
    let error = Service::check_device(DeviceChoice::Cuda(1), 2)
        .unwrap_err()
        .to_string();
    assert!(error.contains("2 from number 1 on"), "{error}");
}

#[test]
fn too_little_device_memory_is_refused_with_the_numbers() {
    if !on_mock(
        "too_little_device_memory_is_refused_with_the_numbers",
        &ENGINE,
    ) {
        return;
    }
    let config = ServiceConfig {
        device_pages: None,
        kv_cache_mib: Some(1 << 20),
        ..config(DeviceChoice::Cuda(0))
    };
    let error = Service::start(&tiny::file("llama"), config)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("1099511") && error.contains("--kv-cache-mib"),
        "{error}"
    );
}

#[test]
fn a_call_that_fails_fails_its_requests_and_the_server_lives() {
    if !on_mock(
        "a_call_that_fails_fails_its_requests_and_the_server_lives",
        &ENGINE,
    ) {
        return;
    }
    let mock = Mock::new();
    let service = Service::start(&tiny::file("llama"), config(DeviceChoice::Cuda(0))).unwrap();
    let question = || Submission::new(prompt(1, 11), 4);
    let expected = ask(&service, question()).0;
    assert!(expected.is_some());
    until(&service, |cache| cache.copies_under_way == 0);
    // A prime, so that every kind of call comes up.
    let every = if every_call() { 1 } else { 11 };
    let (mut failed, mut answered) = (0, 0);
    let mut calls = std::collections::BTreeSet::new();
    let mut n = 1;
    loop {
        service.flush().unwrap();
        mock.fail_at(n, 999);
        let (text, _) = ask(&service, question());
        let reached = mock.report().failed == 1;
        if reached {
            calls.insert(mock.failed_call());
        }
        mock.fail_at(0, 0);
        match &text {
            Some(_) => {
                assert_eq!(text, expected, "call {n}");
                answered += 1;
            }
            None => failed += 1,
        }
        assert!(service.alive(), "call {n}");
        assert_eq!(ask(&service, question()).0, expected, "after call {n}");
        until(&service, |cache| cache.copies_under_way == 0);
        for tier in &service.stats().core.unwrap().cache.tiers {
            assert_eq!(
                tier.held + tier.leased + tier.in_transit,
                0,
                "call {n}: {tier:?}"
            );
        }
        if !reached {
            break;
        }
        n += every;
    }
    println!(
        "\n    one in {every} of {n} calls made to fail: {failed} failed, {answered} answered"
    );
    println!("    {calls:?}");
    assert!(failed > 5, "{failed}");
}

#[test]
fn a_call_that_fails_under_a_prefix_on_its_way_fails_its_request_alone() {
    if !on_mock(
        "a_call_that_fails_under_a_prefix_on_its_way_fails_its_request_alone",
        &ENGINE,
    ) {
        return;
    }
    let mock = Mock::new();
    let service = Service::start(&tiny::file("llama"), config(DeviceChoice::Cuda(0))).unwrap();
    let question = || Submission::new(prompt(1, 30), 4);
    let expected = ask(&service, question()).0;
    assert!(expected.is_some());
    // A prime, so that every kind of call comes up.
    let every = if every_call() { 1 } else { 13 };
    let (mut failed, mut answered, mut n) = (0, 0, 1);
    loop {
        // What was said is on host, and others take its place on the device.
        for seed in [2, 3] {
            assert!(
                ask(&service, Submission::new(prompt(seed, 33), 4))
                    .0
                    .is_some()
            );
        }
        until(&service, |cache| cache.copies_under_way == 0);
        mock.fail_at(n, 999);
        let (text, _) = ask(&service, question());
        let reached = mock.report().failed == 1;
        mock.fail_at(0, 0);
        match &text {
            Some(_) => {
                assert_eq!(text, expected, "call {n}");
                answered += 1;
            }
            None => failed += 1,
        }
        assert_eq!(ask(&service, question()).0, expected, "after call {n}");
        until(&service, |cache| cache.copies_under_way == 0);
        for tier in &service.stats().core.unwrap().cache.tiers {
            let held = tier.held + tier.leased + tier.in_transit;
            assert_eq!(held, 0, "call {n}: {tier:?}");
        }
        if !reached {
            break;
        }
        n += every;
    }
    let begun = service.stats().core.unwrap().schedulers[0].begun_in_transit;
    println!(
        "\n    {n} calls by {every}: {failed} failed, {answered} answered, {begun} in transit"
    );
    assert!(begun > 10, "{begun} requests began in transit");
    assert!(failed > 3 && answered > 1, "{failed} and {answered}");
}

#[test]
fn a_start_that_fails_gives_everything_back() {
    if !on_mock("a_start_that_fails_gives_everything_back", &ENGINE) {
        return;
    }
    let mock = Mock::new();
    let start = || Service::start(&tiny::file("llama"), config(DeviceChoice::Cuda(0)));
    drop(start().unwrap());
    assert_eq!(mock.report().held(), [0; 9]);
    let before = mock.report().calls;
    drop(start().unwrap());
    let calls = mock.report().calls - before;
    let mut refused = 0;
    let every = if every_call() { 1 } else { 11 };
    for n in (1..calls).step_by(every) {
        mock.fail_at(n, 2);
        refused += u32::from(start().is_err());
        mock.fail_at(0, 0);
    }
    println!("\n    {calls} calls of a start, {refused} failed starts");
    assert!(refused > 20);
    // What the failing calls would have given back is all that may remain.
    let kept: u64 = mock.report().held().iter().sum();
    assert!(kept <= calls / every as u64, "{:?}", mock.report());
}
