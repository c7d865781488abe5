//! The tree for engines that own their KV slots: [`SlotTree`], what `rootstock.sglang` grafts into
//! SGLang. Tokens and slots come in as buffers of 64-bit integers and go out as byte arrays of
//! them; the tree allocates and frees nothing.

mod edge;
mod names;

use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::exceptions::PyAssertionError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rootstock::radix::ProgramId;
use rootstock::radix::slots::{
    self, Asker, Handle, Insertion, LeafEnd, SlotConfig, SlotMatch, SpaceName, Step,
};

use crate::clock::now_ns;
use crate::failure::{invalid, poisoned};
use crate::hints::Hints;
use edge::{
    Bytes, FreedSlots, action, actions, bytes, event, failed, freed, handles, ids, longs, tokens_of,
};
use names::{digests_of, hash_page, hex, policy_of, seeds_of};

type StepDone = (usize, u64, Vec<(usize, usize)>);

/// What is inserted: `(extra, salt)`, tokens, slots, tokens that are the tree's already, tokens
/// that were counted, priority, session, program, and who asks: None says nothing new.
type Asked<'py> = (
    (Option<String>, Option<String>),
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    usize,
    usize,
    i64,
    Option<String>,
    Option<u64>,
    Option<Asking<'py>>,
);

/// Hints, tokens of the prompt, when the request came, whether it inserts for the last time.
type Asking<'py> = (Option<PyRef<'py, Hints>>, u32, u64, bool);

/// Policy `agent`: whether LRU rules, rounds lost, watched uses, those found, and per capacity
/// its pages, expected hit tokens, and those of LRU.
type Learned = (bool, u32, u64, u64, Vec<(u64, u64, u64)>);

/// A tree over slots that the engine owns.
#[pyclass(frozen, module = "rootstock")]
#[derive(Debug)]
pub(crate) struct SlotTree {
    tree: Mutex<slots::SlotTree>,
    page_tokens: usize,
}

impl SlotTree {
    fn lock(&self) -> PyResult<MutexGuard<'_, slots::SlotTree>> {
        self.tree.lock().map_err(poisoned)
    }

    fn step(&self, py: Python<'_>, step: &Step) -> PyResult<(Vec<Py<PyTuple>>, Option<StepDone>)> {
        let done = step.result.as_ref();
        let done = done.map(|end| (end.found, end.last.0, end.taken.clone()));
        Ok((actions(py, &step.actions)?, done))
    }
}

#[pymethods]
impl SlotTree {
    /// `policy` is one of lru, lfu, slru, priority, tlru, fifo, filo, mru, agent; `numbers` are of
    /// slru (insertions) or tlru (threshold, estimate).
    #[new]
    #[pyo3(signature = (page_tokens, policy, numbers = Vec::new(), *, events = false,
        pin_budget = 0.0, device_tokens = 0))]
    fn new(
        page_tokens: u32,
        policy: &str,
        numbers: Vec<f64>,
        events: bool,
        pin_budget: f64,
        device_tokens: u64,
    ) -> PyResult<Self> {
        if page_tokens == 0 {
            return Err(invalid("page_tokens is 0"));
        }
        let config = SlotConfig {
            page_tokens,
            policy: policy_of(policy, &numbers)?,
            events,
            hasher: hash_page,
            pin_budget,
            device_tokens,
        };
        Ok(Self {
            tree: Mutex::new(slots::SlotTree::new(config)),
            page_tokens: usize::try_from(page_tokens).map_err(invalid)?,
        })
    }

    fn reset(&self) -> PyResult<()> {
        self.lock()?.reset();
        Ok(())
    }

    fn root(&self) -> PyResult<u64> {
        Ok(self.lock()?.root().0)
    }

    /// How nodes reach the host tier.
    fn set_host(&self, enabled: bool, write_back: bool, hits: u32, storage: bool) -> PyResult<()> {
        let mut tree = self.lock()?;
        tree.host = slots::HostTier {
            enabled,
            write_back,
            write_through_hits: hits,
            storage,
            tokens: tree.host.tokens,
        };
        Ok(())
    }

    /// How many tokens the host tier holds; said before anything is inserted.
    fn set_host_tokens(&self, tokens: u64) -> PyResult<()> {
        self.lock()?.set_host_tokens(tokens);
        Ok(())
    }

    /// Nanoseconds by the clock of the tree.
    #[staticmethod]
    fn now() -> u64 {
        now_ns()
    }

    /// (device tokens, device node, best node, host tokens, tokens, last visited node, action).
    #[expect(
        clippy::type_complexity,
        reason = "one tuple, as Python takes it apart"
    )]
    fn find(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        extra: Option<String>,
        salt: Option<String>,
    ) -> PyResult<(
        usize,
        u64,
        u64,
        usize,
        usize,
        Option<u64>,
        Option<Py<PyTuple>>,
    )> {
        let tokens = tokens_of(py, key, self.page_tokens)?;
        let found: SlotMatch = self
            .lock()?
            .find_prefix(&SpaceName { extra, salt }, &tokens);
        let cut = found
            .action
            .as_ref()
            .map(|cut| action(py, cut))
            .transpose()?;
        Ok((
            found.device_tokens,
            found.device.0,
            found.best.0,
            found.host_tokens,
            found.tokens,
            found.visited.map(|node| node.0),
            cut.map(Bound::unbind),
        ))
    }

    /// (tokens, node, tokens up to the node's end), without touching anything.
    fn peek(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        extra: Option<String>,
        salt: Option<String>,
    ) -> PyResult<(usize, u64, usize)> {
        let tokens = tokens_of(py, key, self.page_tokens)?;
        let (found, node, held) = self
            .lock()?
            .peek_device(&SpaceName { extra, salt }, &tokens);
        Ok((found, node.0, held))
    }

    /// (actions, (tokens that were there, node, taken ranges) at the end or None).
    fn begin_insert(
        &self,
        py: Python<'_>,
        asked: Asked<'_>,
    ) -> PyResult<(Vec<Py<PyTuple>>, Option<StepDone>)> {
        let ((extra, salt), key, slots, owned, counted, priority, session, program, asking) = asked;
        let tokens = tokens_of(py, &key, self.page_tokens)?;
        let mut slots = longs(py, &slots, "slots")?;
        slots.truncate(tokens.len());
        let space = SpaceName { extra, salt };
        let what = Insertion {
            seeds: seeds_of(&space),
            space,
            tokens,
            slots,
            owned,
            counted,
            priority,
            session,
            program: program.map(ProgramId),
            asker: asking.map(|(hints, prompt_tokens, arrived, is_done)| Asker {
                hints: hints.map(|hints| Arc::clone(&hints.said)),
                prompt_tokens,
                arrived,
                is_done,
            }),
        };
        let mut tree = self.lock()?;
        tree.set_now(now_ns());
        let step = tree.begin_insert(what).map_err(failed)?;
        drop(tree);
        self.step(py, &step)
    }

    fn resume_insert(&self, py: Python<'_>) -> PyResult<(Vec<Py<PyTuple>>, Option<StepDone>)> {
        let step = self.lock()?.resume_insert().map_err(failed)?;
        self.step(py, &step)
    }

    fn is_inserting(&self) -> PyResult<bool> {
        Ok(self.lock()?.is_inserting())
    }

    fn end_insert(&self, py: Python<'_>) -> PyResult<Vec<Py<PyTuple>>> {
        let left = self.lock()?.end_insert();
        actions(py, &left)
    }

    fn lease(&self, node: u64) -> PyResult<u64> {
        self.lock()?.lease(Handle(node)).map_err(failed)
    }

    fn release(&self, node: u64) -> PyResult<()> {
        self.lock()?.release(Handle(node)).map_err(failed)
    }

    fn lease_host(&self, node: u64) -> PyResult<Option<u64>> {
        self.lock()?.lease_host(Handle(node)).map_err(failed)
    }

    fn release_host(&self, node: u64, receipt: u64) -> PyResult<()> {
        self.lock()?
            .release_host(Handle(node), receipt)
            .map_err(failed)
    }

    fn begin_walk(&self, tokens: usize) -> PyResult<()> {
        let mut tree = self.lock()?;
        tree.set_now(now_ns());
        tree.begin_walk(tokens);
        Ok(())
    }

    fn next_leaf(&self, freed: usize) -> PyResult<Option<u64>> {
        let next = self.lock()?.next_leaf(freed).map_err(failed)?;
        Ok(next.map(|node| node.0))
    }

    fn end_walk(&self) -> PyResult<()> {
        self.lock()?.end_walk();
        Ok(())
    }

    /// (device slots, host slots, tokens, unbacked tokens), or None and the nodes to copy first.
    fn take_leaf(&self, py: Python<'_>, node: u64) -> PyResult<(Option<FreedSlots>, Vec<u64>)> {
        match self.lock()?.take_leaf(Handle(node)).map_err(failed)? {
            LeafEnd::Gone(gone) => Ok((Some(freed(py, &gone)), Vec::new())),
            LeafEnd::NeedsCopy(nodes) => Ok((None, ids(&nodes))),
        }
    }

    fn demote(&self, py: Python<'_>, node: u64) -> PyResult<FreedSlots> {
        let gone = self.lock()?.demote(Handle(node)).map_err(failed)?;
        Ok(freed(py, &gone))
    }

    fn drop_branch(&self, py: Python<'_>, node: u64) -> PyResult<Option<FreedSlots>> {
        let gone = self.lock()?.drop_branch(Handle(node)).map_err(failed)?;
        Ok(gone.map(|gone| freed(py, &gone)))
    }

    fn evict_host(&self, py: Python<'_>, tokens: usize, keep_twins: bool) -> PyResult<FreedSlots> {
        let mut tree = self.lock()?;
        tree.set_now(now_ns());
        let gone = tree.evict_host(tokens, keep_twins);
        drop(tree);
        Ok(freed(py, &gone))
    }

    fn backup_source(&self, py: Python<'_>, node: u64) -> PyResult<Bytes> {
        let tree = self.lock()?;
        let slots = tree.backup_source(Handle(node)).map_err(failed)?;
        Ok(bytes(py, slots))
    }

    fn commit_backup(&self, py: Python<'_>, node: u64, slots: &Bound<'_, PyAny>) -> PyResult<()> {
        let slots = longs(py, slots, "slots")?;
        self.lock()?
            .commit_backup(Handle(node), slots)
            .map_err(failed)
    }

    fn load_plan(&self, py: Python<'_>, node: u64) -> PyResult<(Bytes, Vec<u64>)> {
        let plan = self.lock()?.load_plan(Handle(node)).map_err(failed)?;
        Ok((bytes(py, &plan.slots), ids(&plan.nodes)))
    }

    fn commit_load(
        &self,
        py: Python<'_>,
        node: u64,
        nodes: Vec<u64>,
        slots: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let slots = longs(py, slots, "slots")?;
        let mut tree = self.lock()?;
        let done = tree.commit_load(Handle(node), &handles(&nodes), &slots);
        done.map_err(failed)
    }

    fn finish_load(&self, node: u64) -> PyResult<()> {
        self.lock()?.finish_load(Handle(node)).map_err(failed)
    }

    fn begin_write(&self, nodes: Vec<u64>, ack: u64) -> PyResult<Vec<u64>> {
        let marked = self.lock()?.begin_write(&handles(&nodes), ack);
        Ok(ids(&marked.map_err(failed)?))
    }

    fn finish_write(&self, nodes: Vec<u64>, ack: u64) -> PyResult<()> {
        let done = self.lock()?.finish_write(&handles(&nodes), ack);
        done.map_err(failed)
    }

    /// (tokens that were there, node or None, dropped, actions).
    #[expect(
        clippy::type_complexity,
        reason = "one tuple, as Python takes it apart"
    )]
    fn insert_host(
        &self,
        py: Python<'_>,
        below: u64,
        key: &Bound<'_, PyAny>,
        slots: &Bound<'_, PyAny>,
        names: Vec<String>,
        space: (Option<String>, Option<String>),
    ) -> PyResult<(usize, Option<u64>, bool, Vec<Py<PyTuple>>)> {
        let tokens = tokens_of(py, key, self.page_tokens)?;
        let slots = longs(py, slots, "slots")?;
        let names = digests_of(&names)?;
        let space = SpaceName {
            extra: space.0,
            salt: space.1,
        };
        let mut tree = self.lock()?;
        let below = tree
            .place_in(Handle(below), &space, seeds_of(&space))
            .map_err(failed)?;
        let end = tree
            .insert_host(below, &tokens, &slots, &names)
            .map_err(failed)?;
        let last = end.last.map(|node| node.0);
        Ok((end.found, last, end.dropped, actions(py, &end.actions)?))
    }

    fn copies_are_prefixes(&self) -> PyResult<bool> {
        Ok(self.lock()?.copies_are_prefixes())
    }

    /// (on the device, on the host tier).
    fn places(&self, node: u64) -> PyResult<(bool, bool)> {
        self.lock()?.places(Handle(node)).map_err(failed)
    }

    fn is_root(&self, node: u64) -> PyResult<bool> {
        self.lock()?.is_root(Handle(node)).map_err(failed)
    }

    fn device_slots(&self, py: Python<'_>, from: u64, until: u64) -> PyResult<Bytes> {
        let slots = self.lock()?.device_slots(Handle(from), Handle(until));
        Ok(bytes(py, &slots.map_err(failed)?))
    }

    fn own_slots(&self, py: Python<'_>, node: u64) -> PyResult<Option<Bytes>> {
        let tree = self.lock()?;
        let slots = tree.own_slots(Handle(node)).map_err(failed)?;
        Ok(slots.map(|slots| bytes(py, slots)))
    }

    /// (host slots, tokens) of a node's own edge.
    fn own_copy(&self, py: Python<'_>, node: u64) -> PyResult<Option<(Bytes, Bytes)>> {
        let tree = self.lock()?;
        let copy = tree.own_copy(Handle(node)).map_err(failed)?;
        Ok(copy.map(|(slots, tokens)| {
            let wide: Vec<_> = tokens.iter().map(|&token| i64::from(token)).collect();
            (bytes(py, slots), bytes(py, &wide))
        }))
    }

    fn namespace_of(&self, node: u64) -> PyResult<(Option<String>, Option<String>)> {
        let space = self.lock()?.namespace_of(Handle(node)).map_err(failed)?;
        Ok((space.extra, space.salt))
    }

    /// Names of the pages of a node's edge, or None when they have none.
    fn names(&self, node: u64) -> PyResult<Option<Vec<String>>> {
        let tree = self.lock()?;
        let names = tree.names(Handle(node)).map_err(failed)?;
        Ok(names.map(|names| names.iter().map(hex).collect()))
    }

    fn names_before(&self, node: u64) -> PyResult<Vec<String>> {
        let names = self.lock()?.names_before(Handle(node)).map_err(failed)?;
        Ok(names.iter().map(hex).collect())
    }

    fn name_all(&self) -> PyResult<usize> {
        Ok(self.lock()?.name_all())
    }

    /// (node, parent, start, end, device tokens or None, children) from the top.
    #[expect(
        clippy::type_complexity,
        reason = "one tuple, as Python takes it apart"
    )]
    fn path(&self, node: u64) -> PyResult<Vec<(u64, u64, usize, usize, Option<usize>, usize)>> {
        let path = self.lock()?.path(Handle(node)).map_err(failed)?;
        let part = |part: &slots::PathPart| {
            let (node, parent) = (part.node.0, part.parent.0);
            (
                node,
                parent,
                part.start,
                part.end,
                part.device_tokens,
                part.children,
            )
        };
        Ok(path.iter().map(part).collect())
    }

    fn order_by_weight(&self, nodes: Vec<u64>) -> PyResult<Vec<usize>> {
        let order = self.lock()?.order_by_weight(&handles(&nodes));
        order.map_err(failed)
    }

    /// Three lists of 64-bit integers: slots, positions, slots before.
    fn rows(&self, py: Python<'_>, with_leased: bool) -> PyResult<(Bytes, Bytes, Bytes)> {
        let rows = self.lock()?.rows(with_leased);
        let column = |part: fn(&slots::SlotRow) -> i64| {
            let all: Vec<_> = rows.iter().map(part).collect();
            bytes(py, &all)
        };
        Ok((
            column(|row| row.slot),
            column(|row| row.position),
            column(|row| row.before),
        ))
    }

    #[getter]
    fn evictable(&self) -> PyResult<u64> {
        Ok(self.lock()?.evictable())
    }

    #[getter]
    fn protected(&self) -> PyResult<u64> {
        Ok(self.lock()?.protected())
    }

    #[getter]
    fn pinned(&self) -> PyResult<u64> {
        Ok(self.lock()?.pinned())
    }

    /// Pinned tokens that no tier had room for.
    #[getter]
    fn lost(&self) -> PyResult<u64> {
        Ok(self.lock()?.lost())
    }

    #[getter]
    fn reclaim_digest(&self) -> PyResult<u64> {
        Ok(self.lock()?.reclaim_digest())
    }

    fn take_events(&self, py: Python<'_>) -> PyResult<Vec<Py<PyTuple>>> {
        let events = self.lock()?.take_events().into_iter();
        events
            .map(|one| event(py, one).map(Bound::unbind))
            .collect()
    }

    /// Holds the path of a node for some seconds; returns the tokens that are held.
    fn pin(&self, node: u64, seconds: f64, program: Option<u64>) -> PyResult<u64> {
        let seconds = std::time::Duration::try_from_secs_f64(seconds).map_err(invalid)?;
        let span = u64::try_from(seconds.as_nanos()).unwrap_or(u64::MAX);
        let until = now_ns().saturating_add(span);
        let held = self
            .lock()?
            .pin(Handle(node), program.map(ProgramId), until);
        held.map_err(failed)
    }

    /// Ends the pins whose time is over; returns how many those are.
    fn expire_pins(&self) -> PyResult<usize> {
        let mut tree = self.lock()?;
        if tree.next_pin_end().is_none() {
            return Ok(0);
        }
        Ok(tree.expire_pins(now_ns()))
    }

    /// What of a pinned path to copy to the host tier now.
    fn copies_for_pin(&self, node: u64) -> PyResult<Vec<u64>> {
        let nodes = self.lock()?.copies_for_pin(Handle(node)).map_err(failed)?;
        Ok(ids(&nodes))
    }

    /// The path of a node counts with `priority` until it idles for `seconds`, or for good.
    fn retain(&self, node: u64, priority: i32, seconds: Option<u32>) -> PyResult<()> {
        let mut tree = self.lock()?;
        tree.set_now(now_ns());
        tree.retain(Handle(node), priority, seconds).map_err(failed)
    }

    /// Where the prefixes of a program end.
    fn ends_of(&self, program: u64) -> PyResult<Vec<u64>> {
        Ok(ids(&self.lock()?.ends_of(ProgramId(program))))
    }

    fn learned(&self, lookup_tokens: u64, hit_tokens: u64) -> PyResult<Option<Learned>> {
        let learned = self.lock()?.learned(lookup_tokens, hit_tokens);
        Ok(learned.map(|learned| {
            let points = learned.curve.iter();
            let points = points.map(|one| (one.pages, one.hit_tokens, one.lru_hit_tokens));
            let duel = learned.duel;
            let (uses, hits) = (duel.watched_uses, duel.watched_hits);
            (
                duel.lru_rules,
                duel.rounds_lost,
                uses,
                hits,
                points.collect(),
            )
        }))
    }

    fn release_program(&self, program: u64) -> PyResult<u64> {
        Ok(self.lock()?.release_program(ProgramId(program)))
    }

    /// Recounts everything; an error says what is wrong.
    fn check(&self) -> PyResult<()> {
        let checked = self.lock()?.check();
        checked.map_err(|found| PyAssertionError::new_err(found.to_string()))
    }

    fn outline(&self) -> PyResult<String> {
        Ok(self.lock()?.outline())
    }
}
