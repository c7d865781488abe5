//! Pages of a store that anybody may have changed: what is read is what was written, or a miss.
//!
//! `cargo +nightly fuzz run storage_page -- -max_total_time=60`, in `tests/`.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use rootstock_memory::storage::{HostPages, Storage, StorageOptions};
use rootstock_memory::{
    CopyId, KvDtype, KvLayout, LayoutOrder, LayoutSpec, PageAddress, PageId, StoreEvent, StoreOp,
    StorePage, StorePlan,
};

/// What becomes of the file.
#[derive(Arbitrary, Debug)]
struct Input {
    /// Bytes that are set, by their place.
    set: Vec<(u16, u8)>,
    /// Its new length, if it is cut or grows.
    len: Option<u16>,
    /// What stands there instead of all of it.
    instead: Option<Vec<u8>>,
}

#[derive(Clone)]
struct Host(Arc<Mutex<Vec<u8>>>);

impl HostPages for Host {
    fn read(&mut self, _page: PageId, out: &mut [u8]) -> bool {
        out.copy_from_slice(&self.0.lock().unwrap());
        true
    }

    fn write(&mut self, _page: PageId, bytes: &[u8]) -> bool {
        self.0.lock().unwrap().copy_from_slice(bytes);
        true
    }
}

/// A store with one page, and the bytes of the page and of its file.
struct World {
    storage: Storage,
    host: Host,
    page: StorePage,
    bytes: Vec<u8>,
    path: PathBuf,
    file: Vec<u8>,
}

impl World {
    fn new() -> World {
        let layout = KvLayout::new(LayoutSpec {
            order: LayoutOrder::PageFirst,
            page_tokens: 4,
            layers: 1,
            kv_heads: 1,
            head_dim: 8,
            dtype: KvDtype::F32,
        })
        .unwrap();
        let bytes: Vec<u8> = (0..=255).cycle().take(layout.page_bytes()).collect();
        let folder = std::env::temp_dir().join(format!("rootstock-fuzz-{}", std::process::id()));
        fs::remove_dir_all(&folder).ok();
        fs::create_dir_all(&folder).unwrap();
        let options = StorageOptions {
            uri: format!("fs://{}", folder.display()),
            layout,
            numerics: "any".to_owned(),
            quota_bytes: u64::MAX,
            queue: 8,
            read_timeout: Duration::from_secs(60),
        };
        let host = Host(Arc::new(Mutex::new(bytes.clone())));
        let storage = Storage::open(&options, host.clone(), || {}).unwrap();
        let tokens = [1, 2, 3, 4];
        let page = StorePage {
            host: PageId::new(1),
            address: namespace().next(&tokens),
            parent: namespace(),
            tokens: tokens.to_vec().into(),
        };
        let pages = folder.join("pages");
        let mut world = World {
            storage,
            host,
            page,
            bytes,
            path: pages.clone(),
            file: Vec::new(),
        };
        assert_eq!(world.run(StoreOp::Write), [true]);
        let only = |path: PathBuf| fs::read_dir(path).unwrap().next().unwrap().unwrap().path();
        world.path = only(only(pages));
        world.file = fs::read(&world.path).unwrap();
        world
    }

    fn run(&self, op: StoreOp) -> Vec<bool> {
        let plan = StorePlan {
            id: CopyId(1),
            op,
            namespace: namespace(),
            pages: vec![self.page.clone()].into(),
        };
        self.storage.submit(plan).unwrap();
        loop {
            let mut events = Vec::new();
            self.storage.poll(&mut events);
            for event in events {
                if let StoreEvent::Done { pages, .. } = event {
                    return pages;
                }
            }
            std::thread::yield_now();
        }
    }
}

fn namespace() -> PageAddress {
    PageAddress::seed(&[Some("model")])
}

fn world() -> &'static Mutex<World> {
    static WORLD: OnceLock<Mutex<World>> = OnceLock::new();
    WORLD.get_or_init(|| Mutex::new(World::new()))
}

fuzz_target!(|input: Input| {
    let world = world().lock().unwrap();
    let mut file = input.instead.unwrap_or_else(|| world.file.clone());
    for (at, byte) in input.set {
        if let Some(place) = file.get_mut(usize::from(at)) {
            *place = byte;
        }
    }
    if let Some(len) = input.len {
        file.resize(usize::from(len), 0);
    }
    fs::create_dir_all(world.path.parent().unwrap()).unwrap();
    fs::write(&world.path, &file).unwrap();
    world.host.0.lock().unwrap().fill(0);
    let read = world.run(StoreOp::Read);
    assert_eq!(read.len(), 1);
    if read[0] {
        assert_eq!(
            *world.host.0.lock().unwrap(),
            world.bytes,
            "another page came back"
        );
    } else {
        assert_ne!(file, world.file, "the page itself is a miss");
    }
});
