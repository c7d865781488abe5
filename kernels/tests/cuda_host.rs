//! The host side on the mock driver: what is missing, what is refused, where compiled code comes
//! from, copies between tiers, and every call made to fail in turn.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "helpers of tests, with small numbers"
)]

#[path = "cuda/mock.rs"]
mod mock;

use std::sync::{Arc, Mutex};

use mock::{Mock, Outcome, Variant, on_mock};
use rootstock_kernels::cuda::{
    AttentionKernels, Batch, BatchRows, CodeOrigin, CudaCopies, CudaError, Device, DeviceBuffer,
    DevicePages, GeneralKernels, KvFormat, Numerics, PageShape, PinnedArena, Stream,
};
use rootstock_kernels::{GgmlType, KvRow};
use rootstock_memory::{
    CopyClass, CopyDone, CopyEngine, CopyId, CopyPlan, KvArena, KvDtype, KvLayout, LayoutOrder,
    LayoutSpec, PageId, ReplicaId, TierId,
};

const HOST: Variant = Variant {
    head_dims: &[64],
    kv_types: &[1],
    sanitized: true,
    fault: None,
};

fn layout() -> KvLayout {
    KvLayout::new(LayoutSpec {
        order: LayoutOrder::PageFirst,
        page_tokens: 16,
        layers: 2,
        kv_heads: 2,
        head_dim: 64,
        dtype: KvDtype::F16,
    })
    .unwrap()
}

fn shape() -> PageShape {
    PageShape::new(layout(), KvFormat::F16).unwrap()
}

#[test]
fn without_a_driver_the_answer_says_so() {
    // On a machine that has one there is nothing to see here.
    match Device::open(1000) {
        Err(CudaError::NoDevice { reason }) => println!("    {reason}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_driver_without_devices_says_so() {
    if std::env::var_os("MOCK_NO_DEVICE").is_some() {
        let error = Device::open(0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no CUDA device: cuInit answers CUDA_ERROR_NO_DEVICE"
        );
        return;
    }
    let environment = [("MOCK_NO_DEVICE", "1")];
    let outcome = mock::outcome_with("a_driver_without_devices_says_so", &HOST, &environment);
    assert!(!matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
}

#[test]
fn what_cannot_be_computed_is_refused_with_the_numbers() {
    if !on_mock("what_cannot_be_computed_is_refused_with_the_numbers", &HOST) {
        return;
    }
    let spec = layout().spec();
    let refused = |spec: LayoutSpec, format| {
        PageShape::new(KvLayout::new(spec).unwrap(), format)
            .unwrap_err()
            .to_string()
    };
    let odd = refused(
        LayoutSpec {
            page_tokens: 48,
            ..spec
        },
        KvFormat::F16,
    );
    assert_eq!(
        odd,
        "pages of 48 tokens: a power of two, at least 1, is wanted"
    );
    let tiny = refused(
        LayoutSpec {
            page_tokens: 2,
            ..spec
        },
        KvFormat::Int8,
    );
    assert_eq!(
        tiny,
        "pages of 2 tokens: a power of two, at least 4, is wanted"
    );
    assert!(
        refused(
            LayoutSpec {
                head_dim: 40,
                ..spec
            },
            KvFormat::F16
        )
        .contains("40")
    );
    let device = Device::open(0).unwrap();
    assert!(
        Device::open(2)
            .unwrap_err()
            .to_string()
            .contains("number 2")
    );
    let stream = Stream::new(&device).unwrap();
    let kernels = GeneralKernels::load(&device, None).unwrap();
    let matrix = kernels
        .matrix(&stream, GgmlType::F32, 2, 12, &[0; 96])
        .unwrap_err();
    assert!(matrix.to_string().contains("12"), "{matrix}");
    let far = LayoutSpec {
        head_dim: 48,
        ..spec
    };
    let far = PageShape::new(KvLayout::new(far).unwrap(), KvFormat::F16).unwrap();
    // The mock has no such module; a machine without NVRTC has none either.
    let none = AttentionKernels::load(&device, &far, None).unwrap_err();
    assert!(!none.to_string().is_empty());
}

#[test]
fn a_step_that_does_not_fit_its_pages_is_refused_before_it_is_uploaded() {
    if !on_mock(
        "a_step_that_does_not_fit_its_pages_is_refused_before_it_is_uploaded",
        &HOST,
    ) {
        return;
    }
    let device = Device::open(0).unwrap();
    let stream = Stream::new(&device).unwrap();
    let pages = DevicePages::new(&device, shape(), 4).unwrap();
    let mut batch = Batch::new(&device, Numerics::Fast).unwrap();
    let mut set = |first_pos, page, tokens: &[u32], picks: &[u32], feed: &[(u32, u32)]| {
        let row = KvRow {
            first_pos,
            len: 2,
            pages: &[PageId::new(page)],
        };
        let given = BatchRows {
            tokens,
            rows: &[row],
            picks,
            feed,
        };
        batch
            .set(&stream, &pages, &given)
            .map_err(|error| error.to_string())
    };
    set(14, 4, &[1, 2], &[1], &[(0, 5)]).unwrap();
    assert!(
        set(15, 4, &[1, 2], &[], &[])
            .unwrap_err()
            .contains("needs 2 pages")
    );
    assert!(set(0, 5, &[1, 2], &[], &[]).unwrap_err().contains("page 5"));
    assert!(
        set(0, 1, &[1], &[], &[])
            .unwrap_err()
            .contains("tokens of a step")
    );
    assert!(set(0, 1, &[1, 2], &[2], &[]).unwrap_err().contains("row 2"));
    assert!(
        set(0, 1, &[1, 2], &[], &[(2, 0)])
            .unwrap_err()
            .contains("row 2")
    );
}

#[test]
fn too_little_memory_is_an_error_with_the_numbers_and_takes_nothing() {
    if !on_mock(
        "too_little_memory_is_an_error_with_the_numbers_and_takes_nothing",
        &HOST,
    ) {
        return;
    }
    let mock = Mock::new();
    let device = Device::open(0).unwrap();
    mock.limit(1 << 20);
    assert_eq!(device.memory().unwrap().total_bytes, 1 << 20);
    let before = mock.report();
    match DevicePages::new(&device, shape(), 1000) {
        Err(CudaError::OutOfMemory {
            wanted_bytes,
            free_bytes,
            ..
        }) => {
            assert_eq!(wanted_bytes, 1001 * shape().page_bytes() as u64);
            assert_eq!(free_bytes, 1 << 20);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(mock.report().held(), before.held());
}

#[test]
fn code_is_compiled_once_and_found_on_disk_and_damage_is_repaired() {
    if !on_mock(
        "code_is_compiled_once_and_found_on_disk_and_damage_is_repaired",
        &HOST,
    ) {
        return;
    }
    let folder = std::env::temp_dir().join(format!("rootstock-code-{}", std::process::id()));
    let device = Device::open(0).unwrap();
    let origin = || {
        AttentionKernels::load(&device, &shape(), Some(&folder))
            .unwrap()
            .origin()
    };
    assert_eq!(origin(), CodeOrigin::Compiled);
    assert_eq!(origin(), CodeOrigin::Cached);
    let entry = std::fs::read_dir(&folder)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let whole = std::fs::read_to_string(&entry).unwrap();
    assert!(whole.contains("HEAD_DIM=64") && whole.contains("nvrtc 12.9"));
    for damage in [
        "",
        "//module -DHEAD_DIM=80 -DKV_TYPE=1\n",
        &whole.replace("12.9", "12.8"),
    ] {
        std::fs::write(&entry, damage).unwrap();
        assert_eq!(origin(), CodeOrigin::Compiled);
        assert_eq!(std::fs::read_to_string(&entry).unwrap(), whole);
    }
    // A folder that cannot be written costs a compilation, no more.
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::write(&folder, "in the way").unwrap();
    assert_eq!(origin(), CodeOrigin::Compiled);
    std::fs::remove_file(&folder).unwrap();
}

#[test]
fn code_that_nvrtc_cannot_make_is_taken_from_what_is_shipped() {
    if !on_mock(
        "code_that_nvrtc_cannot_make_is_taken_from_what_is_shipped",
        &HOST,
    ) {
        return;
    }
    let mock = Mock::new();
    let device = Device::open(0).unwrap();
    // nvrtcVersion is the second call: binding the context is not needed before it.
    mock.fail_at(1, 9);
    let kernels = GeneralKernels::load(&device, None).unwrap();
    assert_eq!(kernels.origin(), CodeOrigin::Prebuilt);
}

/// A device with pages and a host tier, and what is in them.
struct Tiers {
    pages: DevicePages,
    stream: Stream,
    host: Arc<Mutex<KvArena>>,
    copies: CudaCopies,
}

impl Tiers {
    fn new() -> Result<Self, CudaError> {
        let device = Device::open(0)?;
        let stream = Stream::new(&device)?;
        let mut pages = DevicePages::new(&device, shape(), 8)?;
        let bytes: Vec<u8> = (0..pages.bytes().len())
            .map(|at| (at / 1000) as u8)
            .collect();
        *pages.bytes_mut() = stream.upload_now(&bytes, "test")?;
        let host = Arc::new(Mutex::new(KvArena::new(layout(), 8).unwrap()));
        let pinned = Arc::new(PinnedArena::new(&device, Arc::clone(&host))?);
        let copies = CudaCopies::new(&device, &pages, Some(pinned), 3)?;
        Ok(Self {
            pages,
            stream,
            host,
            copies,
        })
    }

    fn device_page(&self, page: u32) -> Vec<u8> {
        let all = self.stream.download_now(self.pages.bytes()).unwrap();
        let bytes = shape().page_bytes();
        all[page as usize * bytes..][..bytes].to_vec()
    }

    fn host_page(&self, page: u32) -> Vec<u8> {
        self.host.lock().unwrap().page(PageId::new(page)).to_vec()
    }

    /// Polls until `count` copies are acknowledged.
    fn wait(&mut self, count: usize) -> Vec<CopyDone> {
        let mut done = Vec::new();
        for _ in 0..1000 {
            self.copies.poll(&mut done);
            if done.len() == count {
                return done;
            }
        }
        panic!("{} of {count} copies", done.len());
    }
}

fn plan(
    id: u64,
    down: bool,
    device: &[u32],
    host: &[u32],
    layers: std::ops::Range<u16>,
) -> CopyPlan {
    let pages = |ids: &[u32]| ids.iter().map(|id| PageId::new(*id)).collect::<Box<[_]>>();
    let (a, b) = (
        (TierId::Device(ReplicaId(0)), pages(device)),
        (TierId::Host, pages(host)),
    );
    let (from, to) = if down { (a, b) } else { (b, a) };
    CopyPlan {
        id: CopyId(id),
        from,
        to,
        layers,
        class: CopyClass::Demote,
        deadline: None,
    }
}

#[test]
fn pages_go_to_host_and_come_back_whole_and_by_layers() {
    if !on_mock("pages_go_to_host_and_come_back_whole_and_by_layers", &HOST) {
        return;
    }
    let mut tiers = Tiers::new().unwrap();
    let (third, fifth) = (tiers.device_page(3), tiers.device_page(5));
    tiers
        .copies
        .submit(plan(1, true, &[3, 5], &[7, 2], 0..2))
        .unwrap();
    assert_eq!(
        tiers.wait(1),
        [CopyDone {
            id: CopyId(1),
            ok: true
        }]
    );
    assert!(tiers.host_page(7) == third && tiers.host_page(2) == fifth);
    tiers
        .copies
        .submit(plan(2, false, &[1], &[7], 1..2))
        .unwrap();
    let before = tiers.device_page(1);
    tiers.wait(1);
    let layer = shape().layer_bytes();
    let after = tiers.device_page(1);
    assert!(after[..layer] == before[..layer] && after[layer..] == third[layer..]);
}

#[test]
fn a_layer_is_there_when_its_event_has_passed_and_the_next_one_is_not() {
    if !on_mock(
        "a_layer_is_there_when_its_event_has_passed_and_the_next_one_is_not",
        &HOST,
    ) {
        return;
    }
    let mut tiers = Tiers::new().unwrap();
    let there: Vec<Vec<u8>> = [3, 5, 6].map(|page| tiers.device_page(page)).into();
    let before: Vec<Vec<u8>> = [1, 2, 8].map(|page| tiers.device_page(page)).into();
    let down = plan(1, true, &[3, 5, 6], &[2, 3, 7], 0..2);
    tiers.copies.submit(down).unwrap();
    tiers.wait(1);
    // Two pages in one strided copy, one by itself.
    let up = plan(2, false, &[1, 2, 8], &[2, 3, 7], 0..2);
    tiers.copies.submit(up).unwrap();
    let layer = shape().layer_bytes();
    // In one download: giving its buffer back runs everything that is queued.
    let now = |tiers: &Tiers| {
        let all = tiers.stream.download_now(tiers.pages.bytes()).unwrap();
        let bytes = shape().page_bytes();
        [1, 2, 8].map(|page| all[page * bytes..][..bytes].to_vec())
    };
    let (wait, id) = (CudaCopies::wait_for_layer, CopyId(2));
    wait(&tiers.copies, &tiers.stream, id, 0).unwrap();
    for ((now, there), before) in now(&tiers).iter().zip(&there).zip(&before) {
        assert!(now[..layer] == there[..layer] && now[layer..] == before[layer..]);
    }
    wait(&tiers.copies, &tiers.stream, id, 1).unwrap();
    assert!(now(&tiers)[..] == there[..]);
    tiers.wait(1);
    wait(&tiers.copies, &tiers.stream, id, 1).unwrap();
    assert!(!tiers.copies.has_failed(id));
    // One that failed is an error before and after its acknowledgement.
    let bad = plan(3, false, &[9], &[1], 0..2);
    tiers.copies.submit(bad).unwrap();
    for _twice in 0..2 {
        let error = wait(&tiers.copies, &tiers.stream, CopyId(3), 0).unwrap_err();
        assert!(!error.is_fatal(), "{error}");
        assert!(tiers.copies.has_failed(CopyId(3)));
        let mut done = Vec::new();
        tiers.copies.poll(&mut done);
    }
}

#[test]
fn plans_that_cannot_be_carried_out_fail_and_a_full_queue_gives_them_back() {
    if !on_mock(
        "plans_that_cannot_be_carried_out_fail_and_a_full_queue_gives_them_back",
        &HOST,
    ) {
        return;
    }
    let mut tiers = Tiers::new().unwrap();
    let bad = [
        plan(1, true, &[0], &[1], 0..2),
        plan(2, true, &[9], &[1], 0..2),
        plan(3, true, &[1], &[1], 1..3),
    ];
    for plan in bad {
        tiers.copies.submit(plan).unwrap();
    }
    let (back, _full) = tiers
        .copies
        .submit(plan(4, true, &[1], &[1], 0..2))
        .unwrap_err();
    assert_eq!(back.id, CopyId(4));
    assert!(tiers.wait(3).iter().all(|done| !done.ok));
    tiers
        .copies
        .submit(plan(5, true, &[1], &[1, 2], 0..2))
        .unwrap();
    tiers.copies.submit(back).unwrap();
    let done = tiers.wait(2);
    assert!(!done[0].ok && done[1].ok);
}

/// Calls without which something cannot be given back.
const GIVES_BACK: [&str; 9] = [
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuMemFree",
    "cuMemHostUnregister",
    "cuStreamDestroy",
    "cuEventDestroy",
    "cuModuleUnload",
    "cuDevicePrimaryCtxRelease",
    "nvrtcDestroyProgram",
];

/// Uses most of the driver once, in the order a replica does.
fn a_short_life() -> Result<Vec<CopyDone>, CudaError> {
    let mut tiers = Tiers::new()?;
    let device = tiers.stream.device().clone();
    AttentionKernels::load(&device, &shape(), None)?;
    let kernels = GeneralKernels::load(&device, None)?;
    let mut batch = Batch::new(&device, Numerics::Fast)?;
    let row = KvRow {
        first_pos: 0,
        len: 1,
        pages: &[PageId::new(1)],
    };
    let given = BatchRows {
        tokens: &[1],
        rows: &[row],
        picks: &[0],
        feed: &[],
    };
    batch.set(&tiers.stream, &tiers.pages, &given)?;
    let table = kernels.matrix(&tiers.stream, GgmlType::F32, 2, 8, &[0; 64])?;
    let mut out = DeviceBuffer::new(&device, 8, "test")?;
    tiers.stream.clear(&mut out)?;
    kernels.embed(&tiers.stream, &batch, &table, &mut out)?;
    tiers.copies.step_launched(&tiers.stream)?;
    // A failed copy is an acknowledgement, not an error.
    let full = |(_, _)| panic!("the queue has room");
    tiers
        .copies
        .submit(plan(1, true, &[3], &[7], 0..2))
        .unwrap_or_else(full);
    tiers
        .copies
        .submit(plan(2, false, &[4], &[7], 0..2))
        .unwrap_or_else(full);
    let done = tiers.wait(2);
    tiers.stream.synchronize()?;
    tiers.stream.download_now(&out)?;
    Ok(done)
}

#[test]
fn every_call_made_to_fail_is_an_error_and_nothing_is_kept() {
    if !on_mock(
        "every_call_made_to_fail_is_an_error_and_nothing_is_kept",
        &HOST,
    ) {
        return;
    }
    let mock = Mock::new();
    assert!(a_short_life().unwrap().iter().all(|done| done.ok));
    let clean = mock.report();
    assert_eq!(clean.held(), [0; 9]);
    let before = mock.report().calls;
    a_short_life().unwrap();
    let calls = mock.report().calls - before;
    let (mut errors, mut survived, mut held) = (0, 0, mock.report().held());
    for code in [2, 719, 999] {
        for n in 1..=calls {
            mock.fail_at(n, code);
            let result = a_short_life();
            let call = mock.failed_call();
            let failed = mock.report().failed;
            mock.fail_at(0, 0);
            if failed == 0 {
                // How often a copy is asked about is a matter of time: this life had fewer calls.
                // Or it met an address that an earlier one was made to leave registered.
                let error = result.as_ref().err().map(ToString::to_string);
                let registered = error.is_some_and(|error| error.contains("ALREADY"));
                let most = n + 20 > calls;
                assert!(most || registered, "call {n} of {calls}: {result:?}");
                continue;
            }
            assert_eq!(failed, 1, "call {n}");
            match result {
                Err(_) => errors += 1,
                // A failed copy, a compiler that is not needed, a call while tearing down.
                Ok(_) => survived += 1,
            }
            // Where giving back was made to fail, that one thing remains.
            let now = mock.report().held();
            let kept: u64 = now.iter().sum::<u64>() - held.iter().sum::<u64>();
            let allowed = GIVES_BACK.iter().any(|name| call.starts_with(name));
            assert!(
                kept <= u64::from(allowed),
                "{call} (call {n}, code {code}): {now:?}"
            );
            held = now;
        }
    }
    println!("\n    {calls} calls, each made to fail 3 ways: {errors} errors, {survived} survived");
    assert!(errors > calls, "most calls matter");
}
