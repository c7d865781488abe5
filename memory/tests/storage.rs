//! The storage tier over a real folder: what comes back is what was written or nothing at all.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use rootstock_memory::storage::{HostPages, Storage, StorageOptions};
use rootstock_memory::{
    CopyId, KvDtype, KvLayout, LayoutOrder, LayoutSpec, PageAddress, PageId, StoreEvent, StoreOp,
    StorePage, StorePlan, StoreStats,
};
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PAGE_TOKENS: u32 = 4;
const CHILD: &str = "ROOTSTOCK_STORAGE_CHILD";

/// Host pages in memory; page `i` is `pages[i]`.
#[derive(Clone)]
struct Host(Arc<Mutex<Vec<Vec<u8>>>>);

impl Host {
    fn new(pages: usize, layout: &KvLayout) -> Self {
        Self(Arc::new(Mutex::new(vec![
            vec![0; layout.page_bytes()];
            pages + 1
        ])))
    }

    fn set(&self, page: u32, bytes: Vec<u8>) {
        self.0.lock().unwrap()[page as usize] = bytes;
    }

    fn get(&self, page: u32) -> Vec<u8> {
        self.0.lock().unwrap()[page as usize].clone()
    }
}

impl HostPages for Host {
    fn read(&mut self, page: PageId, out: &mut [u8]) -> bool {
        out.copy_from_slice(&self.0.lock().unwrap()[page.index()]);
        true
    }

    fn write(&mut self, page: PageId, bytes: &[u8]) -> bool {
        self.0.lock().unwrap()[page.index()].copy_from_slice(bytes);
        true
    }
}

fn layout(dtype: KvDtype) -> KvLayout {
    KvLayout::new(LayoutSpec {
        order: LayoutOrder::PageFirst,
        page_tokens: PAGE_TOKENS,
        layers: 2,
        kv_heads: 1,
        head_dim: 16,
        dtype,
    })
    .unwrap()
}

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("rootstock-{name}-{}", std::process::id()));
    fs::remove_dir_all(&path).ok();
    fs::create_dir_all(&path).unwrap();
    path
}

fn options(folder: &Path) -> StorageOptions {
    StorageOptions {
        uri: format!("fs://{}", folder.display()),
        layout: layout(KvDtype::F32),
        numerics: "avx2/f32".to_owned(),
        quota_bytes: u64::MAX,
        queue: 64,
        read_timeout: Duration::from_secs(60),
    }
}

fn namespace() -> PageAddress {
    PageAddress::seed(&[Some("model"), Some("avx2"), None, None])
}

fn tokens(chain: u32, page: u32) -> Vec<u32> {
    (0..PAGE_TOKENS)
        .map(|at| chain << 16 | page << 8 | at)
        .collect()
}

/// The first `pages` pages of a chain, on host pages from `host` on.
fn chain(chain: u32, pages: u32, host: u32) -> Vec<StorePage> {
    let mut parent = namespace();
    let page = |at: u32| {
        let tokens = tokens(chain, at);
        let address = parent.next(&tokens);
        let page = StorePage {
            host: PageId::new(host + at),
            address,
            parent,
            tokens: tokens.into(),
        };
        parent = address;
        page
    };
    (0..pages).map(page).collect()
}

/// The bytes of a page of a chain.
fn bytes(chain: u32, page: u32, len: usize) -> Vec<u8> {
    let seed = PageAddress::digest(&[chain.to_le_bytes(), page.to_le_bytes()].concat());
    let blocks = std::iter::successors(Some(seed), |block| Some(block.next(&[])));
    blocks.flat_map(|block| block.0).take(len).collect()
}

fn plan(id: u64, op: StoreOp, pages: Vec<StorePage>) -> StorePlan {
    StorePlan {
        id: CopyId(id),
        op,
        namespace: namespace(),
        pages: pages.into(),
    }
}

/// Submits a plan and waits for its answer; events before it are dropped.
fn run(storage: &Storage, plan: StorePlan) -> Vec<bool> {
    let id = plan.id;
    storage.submit(plan).unwrap();
    loop {
        let mut events = Vec::new();
        storage.poll(&mut events);
        for event in events {
            if let StoreEvent::Done { id: done, pages } = event
                && done == id
            {
                return pages;
            }
        }
        std::thread::yield_now();
    }
}

fn write_chain(storage: &Storage, host: &Host, number: u32, pages: u32) {
    let len = layout(KvDtype::F32).page_bytes();
    (0..pages).for_each(|page| host.set(1 + page, bytes(number, page, len)));
    let all = chain(number, pages, 1);
    let id = u64::from(number);
    assert_eq!(
        run(storage, plan(id, StoreOp::Write, all)),
        vec![true; pages as usize]
    );
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for sub in fs::read_dir(folder.join("pages")).into_iter().flatten() {
        let sub = fs::read_dir(sub.unwrap().path()).unwrap();
        found.extend(sub.map(|entry| entry.unwrap().path()));
    }
    found.sort();
    found
}

fn open(folder: &Path, pages: usize) -> (Storage, Host) {
    let host = Host::new(pages, &layout(KvDtype::F32));
    let storage = Storage::open(&options(folder), host.clone(), || {}).unwrap();
    (storage, host)
}

#[test]
fn what_was_written_is_found_after_a_restart_and_comes_back_bit_for_bit() {
    let folder = folder("restart");
    let (storage, host) = open(&folder, 8);
    write_chain(&storage, &host, 1, 8);
    assert!(storage.close().is_empty());
    let (storage, host) = open(&folder, 8);
    let all = chain(1, 8, 1);
    assert_eq!(
        run(&storage, plan(9, StoreOp::Read, all.clone())),
        [true; 8]
    );
    let len = layout(KvDtype::F32).page_bytes();
    assert!((0..8).all(|page| host.get(1 + page) == bytes(1, page, len)));
    let stats = storage.stats();
    assert_eq!((stats.read, stats.pages, stats.written), (8, 8, 0));
    // Written again, nothing is written; cleared, nothing is left.
    assert_eq!(
        run(&storage, plan(10, StoreOp::Write, all.clone())),
        [true; 8]
    );
    assert_eq!(storage.stats().written, 0);
    assert!(run(&storage, plan(11, StoreOp::Clear, Vec::new())).is_empty());
    assert_eq!(run(&storage, plan(12, StoreOp::Read, all)), [false; 8]);
    assert!(files(&folder).is_empty());
    drop(storage);
    let (storage, _) = open(&folder, 1);
    let none = plan(1, StoreOp::Write, Vec::new());
    assert!(run(&storage, none).is_empty());
    assert_eq!(storage.stats().pages, 0);
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_start_tells_what_is_there_and_a_reader_stops_at_the_first_page_that_is_not() {
    let folder = folder("told");
    let (storage, host) = open(&folder, 4);
    write_chain(&storage, &host, 1, 4);
    drop(storage);
    let pages = chain(1, 4, 1);
    let gone = pages[2].address.to_string();
    let path = folder.join("pages").join(&gone[..2]).join(&gone);
    fs::remove_file(path).unwrap();
    fs::write(folder.join("pages").join("no-page-at-all"), "x").unwrap();
    let (storage, _) = open(&folder, 4);
    let read = run(&storage, plan(1, StoreOp::Read, pages.clone()));
    assert_eq!(read, [true, true, false, false]);
    let told = Storage::open(
        &options(&folder),
        Host::new(1, &layout(KvDtype::F32)),
        || {},
    )
    .unwrap();
    let mut known = BTreeSet::new();
    for event in told.close() {
        if let StoreEvent::Learned(addresses) = event {
            known.extend(addresses);
        }
    }
    // Closing may come before all was looked at; what was told is there.
    assert!(
        known
            .iter()
            .all(|one| pages.iter().any(|page| page.address == *one))
    );
    assert_eq!(storage.stats().missing, 1);
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn the_quota_holds_and_the_ends_of_chains_go_first() {
    let folder = folder("quota");
    let (storage, host) = open(&folder, 4);
    write_chain(&storage, &host, 1, 4);
    let page_bytes = storage.stats().bytes / 4;
    drop(storage);
    let mut options = options(&folder);
    options.quota_bytes = 6 * page_bytes;
    let host = Host::new(4, &options.layout);
    let storage = Storage::open(&options, host.clone(), || {}).unwrap();
    write_chain(&storage, &host, 2, 4);
    let stats = storage.stats();
    assert_eq!((stats.evicted, stats.pages), (2, 6));
    assert!(stats.bytes <= options.quota_bytes);
    assert_eq!(files(&folder).len(), 6);
    write_chain(&storage, &host, 3, 4);
    let read = |number, id| run(&storage, plan(id, StoreOp::Read, chain(number, 4, 1)));
    assert_eq!(read(3, 20), [true; 4]);
    assert_eq!(
        read(2, 21),
        [true, true, false, false],
        "the start of a chain goes last"
    );
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn pages_of_another_layout_or_of_other_numerics_are_refused() {
    let folder = folder("foreign");
    let (storage, host) = open(&folder, 2);
    for (change, number) in [
        ("layout", 1),
        ("numerics", 2),
        ("tokens", 3),
        ("namespace", 4),
    ] {
        write_chain(&storage, &host, number, 2);
        let mut other = options(&folder);
        let mut pages = chain(number, 2, 1);
        let mut plan = plan(9, StoreOp::Read, Vec::new());
        match change {
            "layout" => other.layout = layout(KvDtype::F16),
            "numerics" => other.numerics = "avx512/f32".to_owned(),
            "tokens" => pages[0].tokens[1] += 1,
            _ => plan.namespace = PageAddress::seed(&[Some("another")]),
        }
        plan.pages = pages.into();
        let host = Host::new(2, &other.layout);
        let reader = Storage::open(&other, host.clone(), || {}).unwrap();
        assert_eq!(run(&reader, plan), [false, false], "{change}");
        assert_eq!(reader.stats().foreign, 1, "{change}");
        assert!(host.get(1).iter().all(|&byte| byte == 0), "{change}");
    }
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_thousand_corruptions_never_give_wrong_bytes() {
    let folder = folder("corrupt");
    let (storage, host) = open(&folder, 8);
    let len = layout(KvDtype::F32).page_bytes();
    let mut random = 0x5eed_u64;
    let mut below = |n: usize| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(random >> 33).unwrap() % n
    };
    let mut refused = 0;
    for round in 0..1000 {
        write_chain(&storage, &host, 1, 4);
        write_chain(&storage, &host, 2, 4);
        let all = files(&folder);
        assert_eq!(all.len(), 8);
        let path = &all[below(8)];
        let mut record = fs::read(path).unwrap();
        match below(7) {
            0 => {
                let at = below(record.len());
                record[at] ^= 1 << below(8);
            }
            1 => record.truncate(below(record.len())),
            2 => record.extend_from_slice(&[0; 3]),
            3 => record.clear(),
            4 => record = fs::read(&all[below(8)]).unwrap(),
            5 => {
                let (from, to) = (below(record.len()), below(record.len()));
                record.copy_within(from.min(to).., 0);
            }
            _ => {
                let from = below(record.len());
                record[from..].fill(0xff);
            }
        }
        fs::write(path, &record).unwrap();
        for number in [1, 2] {
            (1..=4).for_each(|page| host.set(page, vec![0; len]));
            let id = 10 * round + u64::from(number);
            let read = run(&storage, plan(id, StoreOp::Read, chain(number, 4, 1)));
            for (page, arrived) in (0..).zip(read) {
                let there = host.get(1 + page);
                let right = there == bytes(number, page, len);
                assert_eq!(right, arrived, "page {page} of round {round}");
                assert!(
                    arrived || there.iter().all(|&byte| byte == 0),
                    "nothing half written"
                );
                refused += u64::from(!arrived);
            }
        }
    }
    let StoreStats {
        corrupt,
        truncated,
        foreign,
        missing,
        errors,
        ..
    } = storage.stats();
    assert!(
        corrupt > 300 && truncated > 0 && foreign > 30,
        "{:?}",
        storage.stats()
    );
    assert_eq!((missing, errors), (0, 0));
    assert!(refused >= corrupt + truncated + foreign);
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn closing_answers_every_plan_and_a_full_queue_gives_plans_back() {
    let folder = folder("close");
    let host = Host::new(4, &layout(KvDtype::F32));
    let options = StorageOptions {
        queue: 2,
        ..options(&folder)
    };
    let storage = Storage::open(&options, host, || {}).unwrap();
    let mut accepted = BTreeSet::new();
    let mut full = 0;
    for id in 0..200 {
        match storage.submit(plan(
            id,
            StoreOp::Write,
            chain(u32::try_from(id).unwrap(), 4, 1),
        )) {
            Ok(()) => assert!(accepted.insert(CopyId(id))),
            Err(back) => full += u64::from(back.id == CopyId(id)),
        }
    }
    assert_eq!(accepted.len() as u64 + full, 200);
    assert!(full > 0, "200 plans do not fit a queue of 2");
    for event in storage.close() {
        if let StoreEvent::Done { id, pages } = event {
            assert!(accepted.remove(&id) && pages.len() == 4);
        }
    }
    assert!(accepted.is_empty(), "{accepted:?}");
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn an_address_that_cannot_be_used_is_refused_with_what_would_do() {
    for uri in ["", "fs://relative", "ftp://host/x", "/tmp/x"] {
        let options = StorageOptions {
            uri: uri.to_owned(),
            ..options(Path::new("/tmp"))
        };
        let host = Host::new(1, &options.layout);
        let error = Storage::open(&options, host, || {})
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("fs:///folder") && error.contains(uri),
            "{error}"
        );
    }
}

/// Not a test of its own: the process that the next one kills.
#[test]
fn a_child_writes_until_it_is_killed() {
    let Some(folder) = std::env::var_os(CHILD) else {
        return;
    };
    let (storage, host) = open(Path::new(&folder), 4);
    for number in 0.. {
        write_chain(&storage, &host, number, 4);
        println!("written");
    }
}

#[test]
fn a_process_killed_in_mid_write_leaves_whole_pages_only() {
    let folder = folder("killed");
    for round in 0..5_u32 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "a_child_writes_until_it_is_killed",
                "--nocapture",
            ])
            .env(CHILD, &folder)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let chains = 7 + 11 * round as usize;
        let seen = lines.filter(|line| line.as_ref().unwrap() == "written");
        assert_eq!(seen.take(chains).count(), chains);
        child.kill().unwrap();
        child.wait().unwrap();
        let (storage, host) = open(&folder, 4);
        let len = layout(KvDtype::F32).page_bytes();
        let mut whole = 0;
        for number in 0..u32::try_from(chains).unwrap() {
            let id = u64::from(number);
            let read = run(&storage, plan(id, StoreOp::Read, chain(number, 4, 1)));
            assert_eq!(read, [true; 4], "what was acknowledged is there");
            assert!((0..4).all(|page| host.get(1 + page) == bytes(number, page, len)));
            whole += 4;
        }
        let stats = storage.stats();
        let refused = (stats.corrupt, stats.truncated, stats.foreign, stats.errors);
        assert_eq!((stats.read, refused), (whole, (0, 0, 0, 0)));
    }
    fs::remove_dir_all(&folder).unwrap();
}
