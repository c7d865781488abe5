//! The cache for engines that count references to blocks: [`Block`] is what such an engine keeps
//! lists of, [`Blocks`] the pool behind them. One call does a whole prompt.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use rootstock::ledger::{
    Complete, ContentHash, Counts, HASH_WORDS, LedgerConfig, LedgerError, PageLedger,
};
use rootstock::radix::Fate;

use crate::clock::now_ns;
use crate::failure::{invalid, poisoned, policy as policy_of};
use crate::hints::Hints;

#[derive(Debug)]
struct Shared {
    ledger: Mutex<PageLedger>,
    counts: Counts,
    block_tokens: u32,
    /// Bytes of the host's hashes; 0 until the first one is seen.
    hash_bytes: AtomicUsize,
}

impl Shared {
    fn lock(&self) -> PyResult<MutexGuard<'_, PageLedger>> {
        self.ledger.lock().map_err(poisoned)
    }

    fn bytes_of(&self, hash: &ContentHash) -> Vec<u8> {
        let all = hash.iter().flat_map(|word| word.to_le_bytes());
        all.take(self.hash_bytes.load(Ordering::Relaxed)).collect()
    }

    fn read(&self, hash: &Bound<'_, PyAny>) -> PyResult<ContentHash> {
        let bytes = hash.cast::<PyBytes>()?.as_bytes();
        if bytes.is_empty() || bytes.len() > 4 * HASH_WORDS {
            return Err(invalid(format!(
                "a hash has {} bytes, 1 to {} are possible",
                bytes.len(),
                4 * HASH_WORDS
            )));
        }
        self.hash_bytes.store(bytes.len(), Ordering::Relaxed);
        let mut words = [0; HASH_WORDS];
        for (word, part) in words.iter_mut().zip(bytes.chunks(4)) {
            let mut four = [0; 4];
            four[..part.len()].copy_from_slice(part);
            *word = u32::from_le_bytes(four);
        }
        Ok(words)
    }
}

/// One block of KV: an id, and how many use it. Made by `Blocks` alone.
#[pyclass(frozen, module = "rootstock")]
#[derive(Debug)]
pub(crate) struct Block {
    id: u32,
    shared: Arc<Shared>,
}

#[pymethods]
impl Block {
    #[getter]
    fn block_id(&self) -> u32 {
        self.id
    }

    #[getter]
    fn ref_cnt(&self) -> u32 {
        self.shared.counts[self.id as usize].load(Ordering::Relaxed)
    }

    #[getter]
    fn is_null(&self) -> bool {
        self.id == 0
    }

    /// The name under which it is cached: the hash and a group id of 0.
    #[getter]
    fn block_hash<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let hash = self.shared.lock()?.hash_of(self.id);
        Ok(hash.map(|hash| {
            let mut bytes = self.shared.bytes_of(&hash);
            bytes.extend([0; 4]);
            PyBytes::new(py, &bytes)
        }))
    }

    /// Tokens of the prompt up to its end, while it is cached.
    #[getter]
    fn block_hash_num_tokens(&self) -> PyResult<Option<u32>> {
        let depth = self.shared.lock()?.depth_of(self.id);
        Ok(depth.map(|blocks| blocks * self.shared.block_tokens))
    }

    /// The pool that it belongs to; none is the one that made it.
    #[getter]
    fn pool(&self) -> Option<Py<PyAny>> {
        None
    }

    fn __repr__(&self) -> String {
        format!("Block(block_id={}, ref_cnt={})", self.id, self.ref_cnt())
    }
}

/// How many of these blocks nobody uses, the null block aside.
#[pyfunction]
pub(crate) fn count_idle(blocks: &Bound<'_, PyAny>) -> PyResult<usize> {
    let idle = |block: &Bound<'_, PyAny>| {
        let block = block.cast::<Block>()?.get();
        PyResult::Ok(usize::from(block.id != 0 && block.ref_cnt() == 0))
    };
    if let Ok(list) = blocks.cast::<PyList>() {
        return list.iter().map(|block| idle(&block)).sum();
    }
    blocks.try_iter()?.map(|block| idle(&block?)).sum()
}

/// A pool of blocks with a prefix cache. Block 0 is the null block, which holds nothing.
#[pyclass(frozen, module = "rootstock")]
#[derive(Debug)]
pub(crate) struct Blocks {
    shared: Arc<Shared>,
    blocks: Vec<Py<Block>>,
}

impl Blocks {
    fn list<'py>(&self, py: Python<'py>, ids: &[u32]) -> PyResult<Bound<'py, PyList>> {
        let blocks = ids.iter().map(|&id| self.blocks[id as usize].bind(py));
        PyList::new(py, blocks)
    }

    fn look<T>(
        &self,
        hashes: &Bound<'_, PyAny>,
        count: usize,
        take: impl FnOnce(&[u32]) -> PyResult<T>,
    ) -> PyResult<T> {
        let mut failed = None;
        let mut ledger = self.shared.lock()?;
        let list = hashes.cast::<PyList>().ok();
        let found = ledger.find(count.min(hashes.len()?), |at| {
            let item = match list {
                Some(list) => list.get_item(at),
                None => hashes.get_item(at),
            };
            match item.and_then(|item| self.shared.read(&item)) {
                Ok(hash) => hash,
                Err(error) => {
                    failed.get_or_insert(error);
                    [0; HASH_WORDS]
                }
            }
        });
        match failed {
            Some(error) => Err(error),
            None => take(found),
        }
    }

    fn id(&self, block: &Bound<'_, PyAny>) -> PyResult<u32> {
        let block = block.cast::<Block>()?.get();
        if !Arc::ptr_eq(&block.shared, &self.shared) {
            return Err(PyTypeError::new_err("a block of another pool"));
        }
        Ok(block.id)
    }

    fn ids(&self, blocks: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        if let Ok(list) = blocks.cast::<PyList>() {
            return list.iter().map(|block| self.id(&block)).collect();
        }
        blocks.try_iter()?.map(|block| self.id(&block?)).collect()
    }
}

#[pymethods]
impl Blocks {
    /// A pool of `num_blocks` blocks, the null block included. Pins hold at most `pin_budget` of
    /// them, and always leave `request_blocks`.
    #[new]
    #[pyo3(signature = (num_blocks, *, policy = "agent", pin_budget = 0.2, request_blocks = 0,
        block_tokens = 16))]
    fn new(
        py: Python<'_>,
        num_blocks: u32,
        policy: &str,
        pin_budget: f64,
        request_blocks: u32,
        block_tokens: u32,
    ) -> PyResult<Self> {
        let ledger = PageLedger::new(&LedgerConfig {
            pages: num_blocks.saturating_sub(1),
            policy: policy_of(policy)?,
            pin_budget,
            request_pages: request_blocks,
        });
        let ledger = ledger.map_err(invalid)?;
        let shared = Arc::new(Shared {
            counts: ledger.counts().clone(),
            ledger: Mutex::new(ledger),
            block_tokens,
            hash_bytes: AtomicUsize::new(0),
        });
        let made = (0..num_blocks).map(|id| {
            let shared = shared.clone();
            Py::new(py, Block { id, shared })
        });
        let blocks = made.collect::<PyResult<_>>()?;
        Ok(Self { shared, blocks })
    }

    /// All blocks, by id.
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.blocks.iter().map(|block| block.bind(py)))
    }

    /// The blocks of the longest cached prefix among the first `count` of `hashes`. Nothing keeps
    /// them until they are touched.
    fn find<'py>(
        &self,
        py: Python<'py>,
        hashes: &Bound<'py, PyAny>,
        count: usize,
    ) -> PyResult<Bound<'py, PyList>> {
        self.look(hashes, count, |found| self.list(py, found))
    }

    /// How many blocks `find` would give.
    fn find_length(&self, hashes: &Bound<'_, PyAny>, count: usize) -> PyResult<usize> {
        self.look(hashes, count, |found| Ok(found.len()))
    }

    /// One more user of each of these blocks, which keeps them.
    fn touch(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids = self.ids(blocks)?;
        let touched = self.shared.lock()?.touch(&ids, now_ns());
        touched.map_err(invalid)
    }

    /// Hands out `count` blocks with one user each, and the names of what went for them.
    ///
    /// Raises ValueError when fewer can be had; nothing has changed then.
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        count: u32,
    ) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyList>)> {
        let (mut ids, mut gone) = (Vec::new(), Vec::new());
        let mut ledger = self.shared.lock()?;
        let got = ledger.allocate(count, now_ns(), &mut ids, &mut gone);
        drop(ledger);
        got.map_err(|error| match error {
            LedgerError::Short { asked, .. } => {
                PyValueError::new_err(format!("Cannot get {asked} free blocks from the pool"))
            }
            other => invalid(other),
        })?;
        let gone = gone.iter().map(|(_, hash)| {
            let bytes = self.shared.bytes_of(hash);
            PyBytes::new(py, &bytes)
        });
        Ok((
            self.list(py, &ids)?,
            PyList::new(py, gone.collect::<Vec<_>>())?,
        ))
    }

    /// Names the blocks `cached` to `full` of a request after `hashes`, so that others find them;
    /// how many are new in the cache.
    #[pyo3(signature = (blocks, cached, full, hashes, hints = None))]
    fn cache(
        &self,
        blocks: &Bound<'_, PyAny>,
        cached: usize,
        full: usize,
        hashes: &Bound<'_, PyAny>,
        hints: Option<&Hints>,
    ) -> PyResult<usize> {
        let full = full.min(blocks.len()?).min(hashes.len()?);
        let after = match cached.checked_sub(1).filter(|&at| at < full) {
            Some(at) => Some(self.id(&blocks.get_item(at)?)?),
            None => None,
        };
        let (mut ids, mut words) = (Vec::new(), Vec::new());
        for at in cached..full {
            ids.push(self.id(&blocks.get_item(at)?)?);
            words.extend(self.shared.read(&hashes.get_item(at)?)?);
        }
        let complete = Complete {
            cached,
            after,
            pages: &ids,
            words: &words,
            about: hints.map(|hints| &*hints.about),
        };
        let done = self.shared.lock()?.cache(complete, now_ns());
        done.map_err(invalid)
    }

    /// One user less of each of these blocks, from the end of the prompt to its start.
    /// `preempted` says that their request will be back.
    #[pyo3(signature = (blocks, preempted = false))]
    fn free(&self, blocks: &Bound<'_, PyAny>, preempted: bool) -> PyResult<()> {
        let ids = self.ids(blocks)?;
        let fate = if preempted {
            Fate::Preempted
        } else {
            Fate::Keep
        };
        let freed = self.shared.lock()?.free(&ids, fate, now_ns());
        freed.map_err(invalid)
    }

    /// Blocks that can be had: free, or cached and idle. Pinned ones are not counted.
    fn available(&self) -> PyResult<u32> {
        let mut ledger = self.shared.lock()?;
        ledger.tick(now_ns());
        Ok(ledger.available())
    }

    /// The block of one hash.
    fn block_of(&self, py: Python<'_>, hash: &Bound<'_, PyAny>) -> PyResult<Option<Py<Block>>> {
        let hash = self.shared.read(hash)?;
        let page = self.shared.lock()?.page_of(&hash);
        Ok(page.map(|page| self.blocks[page as usize].clone_ref(py)))
    }

    /// The content of a block is bad: it is not found any more. Its name, if it had one.
    fn spoil<'py>(&self, py: Python<'py>, block: u32) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let hash = self.shared.lock()?.spoil(block);
        Ok(hash.map(|hash| PyBytes::new(py, &self.shared.bytes_of(&hash))))
    }

    /// Empties the cache, pins included; False, and nothing changed, while blocks are in use.
    fn reset(&self) -> PyResult<bool> {
        Ok(self.shared.lock()?.reset(now_ns()))
    }

    /// Counters by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.shared.lock()?.stats();
        let all = PyDict::new(py);
        all.set_item("lookups", stats.lookups)?;
        all.set_item("repeated_lookups", stats.repeated)?;
        all.set_item("evicted_blocks", stats.evicted_pages)?;
        all.set_item("duplicate_blocks", stats.duplicate_pages)?;
        all.set_item("unnamed_blocks", stats.unnamed_pages)?;
        all.set_item("pinned_blocks", stats.pinned_pages)?;
        all.set_item("pins_yielded", stats.pins_yielded)?;
        Ok(all)
    }

    /// Recounts everything from scratch; raises ValueError with the first contradiction.
    fn check(&self) -> PyResult<()> {
        self.shared.lock()?.check().map_err(invalid)
    }
}
