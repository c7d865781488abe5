//! The thread that owns a store: tells what is there, then carries out plans one after the other.

use super::queue::{Queue, Submitted};
use super::record::{Kind, Refused};
use super::shelf::Shelf;
use super::unfinished::Unfinished;
use super::{Counts, HostPages, StorageOptions, one_more};
use crate::{PageAddress, StoreEvent, StoreOp, StorePage, StorePlan};
use opendal::{ErrorKind, Operator};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

/// Pages told about in one event.
const TOLD_AT_ONCE: usize = 4096;

/// Pages that are asked for at the same time: a remote store answers each after a while.
const AT_ONCE: usize = 8;

const FOLDER: &str = "pages/";

pub(super) struct Worker {
    store: Operator,
    host: Box<dyn HostPages>,
    kind: Kind,
    shelf: Shelf,
    quota_bytes: u64,
    read_timeout: Duration,
    ties: Ties,
    queue: Queue,
    buffer: Vec<u8>,
}

/// What the worker shares with its handle.
pub(super) struct Ties {
    pub(super) tell: Sender<StoreEvent>,
    pub(super) wake: Box<dyn Fn() + Send>,
    pub(super) counts: Arc<Counts>,
    pub(super) stop: Arc<AtomicBool>,
    /// Where files lie until they are whole; kept for as long as there is somebody who writes.
    pub(super) _unfinished: Option<Unfinished>,
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
        queue: Queue,
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
            queue,
        }
    }

    pub(super) async fn run(mut self, lists: bool) {
        if lists {
            self.look_around().await;
        }
        while let Some(Submitted { plan, at }) = self.queue.next() {
            let pages = match plan.op {
                _ if self.is_stopping() => vec![false; plan.pages.len()],
                StoreOp::Write => self.write(&plan).await,
                StoreOp::Read | StoreOp::Look => self.answer(&plan, at).await,
                StoreOp::Clear => self.clear().await,
            };
            if !self.acknowledge(&plan, pages) {
                break;
            }
        }
    }

    fn is_stopping(&self) -> bool {
        self.ties.stop.load(Ordering::Acquire)
    }

    fn acknowledge(&self, plan: &StorePlan, pages: Vec<bool>) -> bool {
        self.gauge();
        self.tell(StoreEvent::Done { id: plan.id, pages })
    }

    /// Carries out what somebody waits for.
    async fn answer(&mut self, plan: &StorePlan, at: Instant) -> Vec<bool> {
        let deadline = at + self.read_timeout;
        if plan.op == StoreOp::Look {
            self.look(plan, deadline).await
        } else {
            self.read(plan, deadline).await
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
            if self.is_stopping() {
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
            // Who waits does not wait for more than a page.
            while let Some(read) = self.queue.next_read() {
                let pages = self.answer(&read.plan, read.at).await;
                self.acknowledge(&read.plan, pages);
            }
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
        if self.is_stopping() || !self.host.read(page.host, &mut self.buffer) {
            return false;
        }
        let record = self.kind.encode(namespace, page, &self.buffer);
        let bytes = record.len() as u64;
        let path = path_of(page.address);
        let write = self.store.write(&path, record);
        let failed = match timeout(self.read_timeout, write).await {
            Ok(Ok(_)) => None,
            Ok(Err(_)) => Some(&self.ties.counts.errors),
            Err(_) => Some(&self.ties.counts.timeouts),
        };
        if let Some(count) = failed {
            one_more(count);
            return false;
        }
        self.shelf.put(page.address, bytes);
        one_more(&self.ties.counts.written);
        true
    }

    async fn read(&mut self, plan: &StorePlan, deadline: Instant) -> Vec<bool> {
        let mut arrived = vec![false; plan.pages.len()];
        let store = self.store.clone();
        let read = move |path: String| {
            let store = store.clone();
            async move { store.read(&path).await }
        };
        let mut coming = Ahead::new(&plan.pages, read);
        for (page, arrived) in plan.pages.iter().zip(&mut arrived) {
            let record = coming.next(deadline).await;
            *arrived = match record {
                Ok(record) => self.take_in(plan.namespace, page, &record.to_vec()).await,
                Err(missed) => self.missed(page, missed),
            };
            if !*arrived {
                break;
            }
        }
        drop(coming);
        let used = plan.pages.iter().zip(&arrived).rev();
        for (page, _) in used.filter(|(_, arrived)| **arrived) {
            self.shelf.touch(page.address);
        }
        arrived
    }

    /// Which pages are there, up to the first that is not.
    async fn look(&mut self, plan: &StorePlan, deadline: Instant) -> Vec<bool> {
        let mut there = vec![false; plan.pages.len()];
        let store = self.store.clone();
        let stat = move |path: String| {
            let store = store.clone();
            async move { store.stat(&path).await }
        };
        let mut coming = Ahead::new(&plan.pages, stat);
        for (page, there) in plan.pages.iter().zip(&mut there) {
            match coming.next(deadline).await {
                Ok(_) => *there = true,
                // Nobody said that it would be there.
                Err(Missed::Absent) => break,
                Err(missed) => {
                    self.missed(page, missed);
                    break;
                }
            }
        }
        there
    }

    fn missed(&mut self, page: &StorePage, missed: Missed) -> bool {
        let counts = &self.ties.counts;
        match missed {
            Missed::Absent => {
                one_more(&counts.missing);
                self.lose(page.address);
            }
            Missed::Failed => one_more(&counts.errors),
            Missed::Late => one_more(&counts.timeouts),
        }
        false
    }

    /// Compares a record and puts its bytes where they are wanted.
    async fn take_in(&mut self, namespace: PageAddress, page: &StorePage, record: &[u8]) -> bool {
        let count: fn(&Counts) -> &AtomicU64 = match self.kind.decode(namespace, page, record) {
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
            Err(Refused::Length) => |counts| &counts.truncated,
            Err(Refused::Corrupt) => |counts| &counts.corrupt,
            Err(Refused::Foreign) => |counts| &counts.foreign,
        };
        one_more(count(&self.ties.counts));
        self.delete(page.address).await;
        false
    }

    async fn keep_quota(&mut self) {
        let mut lost = Vec::new();
        while let Some(address) = self.shelf.excess(self.quota_bytes) {
            self.unlink(address).await;
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
        self.unlink(address).await;
        self.lose(address);
    }

    async fn unlink(&self, address: PageAddress) {
        let path = path_of(address);
        match timeout(self.read_timeout, self.store.delete(&path)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => one_more(&self.ties.counts.errors),
            Err(_) => one_more(&self.ties.counts.timeouts),
        }
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

/// Why a page was not to be had.
enum Missed {
    Absent,
    Failed,
    Late,
}

/// Answers about pages in their order, a few asked for ahead of time.
struct Ahead<T> {
    asked: VecDeque<JoinHandle<opendal::Result<T>>>,
    paths: VecDeque<String>,
    ask: Box<dyn Fn(String) -> JoinHandle<opendal::Result<T>> + Send>,
}

impl<T: Send + 'static> Ahead<T> {
    fn new<F>(pages: &[StorePage], ask: impl Fn(String) -> F + Send + 'static) -> Self
    where
        F: Future<Output = opendal::Result<T>> + Send + 'static,
    {
        Self {
            asked: VecDeque::new(),
            paths: pages.iter().map(|page| path_of(page.address)).collect(),
            ask: Box::new(move |path| tokio::spawn(ask(path))),
        }
    }

    async fn next(&mut self, deadline: Instant) -> Result<T, Missed> {
        while self.asked.len() < AT_ONCE
            && let Some(path) = self.paths.pop_front()
        {
            self.asked.push_back((self.ask)(path));
        }
        let first = self.asked.pop_front().ok_or(Missed::Absent)?;
        let stop = first.abort_handle();
        match timeout_at(deadline, first).await {
            Ok(Ok(Ok(answer))) => Ok(answer),
            Ok(Ok(Err(error))) if error.kind() == ErrorKind::NotFound => Err(Missed::Absent),
            Ok(_) => Err(Missed::Failed),
            Err(_) => {
                stop.abort();
                Err(Missed::Late)
            }
        }
    }
}

impl<T> Drop for Ahead<T> {
    fn drop(&mut self) {
        self.asked.iter().for_each(JoinHandle::abort);
    }
}
