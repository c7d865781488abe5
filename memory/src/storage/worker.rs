//! The thread that owns a store: tells what is there, then carries out plans one after the other.

use super::record::{Kind, Refused};
use super::shelf::Shelf;
use super::{Counts, HostPages, StorageOptions, one_more};
use crate::{PageAddress, StoreEvent, StoreOp, StorePage, StorePlan};
use opendal::{ErrorKind, Operator};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Pages told about in one event.
const TOLD_AT_ONCE: usize = 4096;

const FOLDER: &str = "pages/";

pub(super) struct Worker {
    store: Operator,
    host: Box<dyn HostPages>,
    kind: Kind,
    shelf: Shelf,
    quota_bytes: u64,
    read_timeout: Duration,
    ties: Ties,
    buffer: Vec<u8>,
}

/// What the worker shares with its handle.
pub(super) struct Ties {
    pub(super) tell: Sender<StoreEvent>,
    pub(super) wake: Box<dyn Fn() + Send>,
    pub(super) counts: Arc<Counts>,
    pub(super) stop: Arc<AtomicBool>,
}

/// `pages/ab/abcd...`: folders of bounded size.
fn path_of(address: PageAddress) -> String {
    let name = address.to_string();
    format!("{FOLDER}{}/{name}", &name[..2])
}

impl Worker {
    pub(super) fn new(
        options: &StorageOptions,
        store: Operator,
        host: Box<dyn HostPages>,
        ties: Ties,
    ) -> Self {
        let kind = Kind::new(&options.layout, &options.numerics);
        Self {
            store,
            host,
            buffer: vec![0; kind.page_bytes()],
            kind,
            shelf: Shelf::default(),
            quota_bytes: options.quota_bytes,
            read_timeout: options.read_timeout,
            ties,
        }
    }

    pub(super) async fn run(mut self, lists: bool, plans: &Receiver<StorePlan>) {
        if lists {
            self.look_around().await;
        }
        while let Ok(plan) = plans.recv() {
            let pages = if self.ties.stop.load(Ordering::Acquire) {
                vec![false; plan.pages.len()]
            } else {
                match plan.op {
                    StoreOp::Write => self.write(&plan).await,
                    StoreOp::Read => self.read(&plan).await,
                    StoreOp::Clear => self.clear().await,
                }
            };
            self.gauge();
            let done = StoreEvent::Done { id: plan.id, pages };
            if !self.tell(done) {
                break;
            }
        }
    }

    fn gauge(&self) {
        let pages = self.shelf.len() as u64;
        self.ties.counts.pages.store(pages, Ordering::Relaxed);
        self.ties
            .counts
            .bytes
            .store(self.shelf.bytes(), Ordering::Relaxed);
    }

    /// Puts what the store has on the shelf, oldest first, and tells it.
    async fn look_around(&mut self) {
        let list = self.store.list_with(FOLDER).recursive(true).await;
        let Ok(entries) = list else {
            one_more(&self.ties.counts.errors);
            return;
        };
        let mut found = Vec::new();
        for entry in entries {
            let name = entry.path().rsplit('/').next().unwrap_or_default();
            let Some(address) = PageAddress::parse(name) else {
                continue;
            };
            if self.ties.stop.load(Ordering::Acquire) {
                return;
            }
            let Ok(metadata) = self.store.stat(entry.path()).await else {
                continue;
            };
            let age = metadata.last_modified().map(|time| time.to_string());
            found.push((age, address, metadata.content_length()));
        }
        found.sort_unstable();
        for (_, address, bytes) in found {
            self.shelf.put(address, bytes);
        }
        self.keep_quota().await;
        let all: Vec<PageAddress> = self.shelf.addresses().collect();
        for part in all.chunks(TOLD_AT_ONCE) {
            self.tell(StoreEvent::Learned(part.to_vec()));
        }
        self.gauge();
    }

    async fn write(&mut self, plan: &StorePlan) -> Vec<bool> {
        let mut written = Vec::with_capacity(plan.pages.len());
        for page in &plan.pages {
            written.push(self.write_page(plan.namespace, page).await);
        }
        // Whoever reads a chain reads it from its start, so the start is to go last.
        for page in plan.pages.iter().rev() {
            self.shelf.touch(page.address);
        }
        self.keep_quota().await;
        let kept = |page: &StorePage| self.shelf.has(page.address);
        let pages = plan.pages.iter().map(kept);
        pages.zip(written).map(|(kept, ok)| kept && ok).collect()
    }

    async fn write_page(&mut self, namespace: PageAddress, page: &StorePage) -> bool {
        if self.shelf.has(page.address) {
            return true;
        }
        if self.ties.stop.load(Ordering::Acquire) || !self.host.read(page.host, &mut self.buffer) {
            return false;
        }
        let record = self.kind.encode(namespace, page, &self.buffer);
        let bytes = record.len() as u64;
        if self
            .store
            .write(&path_of(page.address), record)
            .await
            .is_err()
        {
            one_more(&self.ties.counts.errors);
            return false;
        }
        self.shelf.put(page.address, bytes);
        one_more(&self.ties.counts.written);
        true
    }

    async fn read(&mut self, plan: &StorePlan) -> Vec<bool> {
        let deadline = Instant::now() + self.read_timeout;
        let mut arrived = vec![false; plan.pages.len()];
        for (page, arrived) in plan.pages.iter().zip(&mut arrived) {
            *arrived = self.read_page(plan.namespace, page, deadline).await;
            if !*arrived {
                break;
            }
        }
        let used = plan.pages.iter().zip(&arrived).rev();
        for (page, _) in used.filter(|(_, arrived)| **arrived) {
            self.shelf.touch(page.address);
        }
        arrived
    }

    async fn read_page(
        &mut self,
        namespace: PageAddress,
        page: &StorePage,
        deadline: Instant,
    ) -> bool {
        let path = path_of(page.address);
        let record = match timeout_at(deadline, self.store.read(&path)).await {
            Ok(Ok(record)) => record.to_vec(),
            Ok(Err(error)) if error.kind() == ErrorKind::NotFound => {
                one_more(&self.ties.counts.missing);
                self.lose(page.address);
                return false;
            }
            Ok(Err(_)) => {
                one_more(&self.ties.counts.errors);
                return false;
            }
            Err(_) => {
                one_more(&self.ties.counts.timeouts);
                return false;
            }
        };
        let count = match self.kind.decode(namespace, page, &record) {
            Ok(kv) => {
                let arrived = self.host.write(page.host, kv);
                if arrived {
                    one_more(&self.ties.counts.read);
                    if !self.shelf.has(page.address) {
                        self.shelf.put(page.address, record.len() as u64);
                    }
                }
                return arrived;
            }
            Err(Refused::Length) => &self.ties.counts.truncated,
            Err(Refused::Corrupt) => &self.ties.counts.corrupt,
            Err(Refused::Foreign) => &self.ties.counts.foreign,
        };
        one_more(count);
        self.delete(page.address).await;
        false
    }

    async fn keep_quota(&mut self) {
        let mut lost = Vec::new();
        while let Some(address) = self.shelf.excess(self.quota_bytes) {
            if self.store.delete(&path_of(address)).await.is_err() {
                one_more(&self.ties.counts.errors);
            }
            self.shelf.remove(address);
            one_more(&self.ties.counts.evicted);
            lost.push(address);
        }
        if !lost.is_empty() {
            self.tell(StoreEvent::Lost(lost));
        }
    }

    async fn clear(&mut self) -> Vec<bool> {
        let all: Vec<PageAddress> = self.shelf.addresses().collect();
        for address in all {
            self.delete(address).await;
        }
        self.shelf.clear();
        Vec::new()
    }

    async fn delete(&mut self, address: PageAddress) {
        if self.store.delete(&path_of(address)).await.is_err() {
            one_more(&self.ties.counts.errors);
        }
        self.lose(address);
    }

    fn lose(&mut self, address: PageAddress) {
        self.shelf.remove(address);
        self.tell(StoreEvent::Lost(vec![address]));
    }

    /// False without a listener: the store is being closed.
    fn tell(&self, event: StoreEvent) -> bool {
        let told = self.ties.tell.send(event).is_ok();
        (self.ties.wake)();
        told
    }
}
