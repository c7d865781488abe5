//! Interned namespaces, each with its root in the tree. Bounded: when all slots are taken, the
//! oldest namespace that holds nothing gives its slot away. Its id is never used again, so a
//! request that still has it misses instead of meeting foreign KV.

use crate::event::namespace_seed;
use crate::{CacheError, NamespaceId, NamespaceKey, PrefixCache};
use rootstock_memory::PageAddress;
use std::collections::BTreeMap;

#[derive(Debug)]
struct Entry {
    generation: u32,
    root: u32,
    /// `None` for a namespace that outlived its name.
    key: Option<NamespaceKey>,
    seed: u64,
    /// What addresses in storage start from; nothing of a nameless namespace is stored.
    store_seed: Option<PageAddress>,
}

/// All namespaces.
#[derive(Debug)]
pub(crate) struct Namespaces {
    slots: Vec<Option<Entry>>,
    generations: Vec<u32>,
    by_key: BTreeMap<NamespaceKey, NamespaceId>,
    by_root: BTreeMap<u32, u32>,
    free: Vec<u32>,
    /// Where the search for an unused one goes on.
    hand: usize,
    limit: u32,
}

impl Namespaces {
    pub(crate) const fn new(limit: u32) -> Self {
        Self {
            slots: Vec::new(),
            generations: Vec::new(),
            by_key: BTreeMap::new(),
            by_root: BTreeMap::new(),
            free: Vec::new(),
            hand: 0,
            limit,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn find(&self, key: &NamespaceKey) -> Option<NamespaceId> {
        self.by_key.get(key).copied()
    }

    /// The root of a namespace that still exists.
    pub(crate) fn root(&self, id: NamespaceId) -> Option<u32> {
        let entry = self.slots.get(id.slot())?.as_ref()?;
        (entry.generation == id.generation()).then_some(entry.root)
    }

    /// The namespace of a root.
    pub(crate) fn id_of(&self, root: u32) -> Option<NamespaceId> {
        let slot = self.by_root.get(&root)?;
        let entry = self.slots[*slot as usize].as_ref()?;
        Some(NamespaceId::new(*slot, entry.generation))
    }

    /// The name of a namespace that still exists and has one.
    pub(crate) fn key_of(&self, id: NamespaceId) -> Option<&NamespaceKey> {
        let entry = self.slots.get(id.slot())?.as_ref()?;
        (entry.generation == id.generation()).then_some(entry.key.as_ref())?
    }

    /// Seed of the hashes below a root.
    pub(crate) fn seed_of(&self, root: u32) -> u64 {
        let entry = self
            .by_root
            .get(&root)
            .and_then(|&slot| self.slots[slot as usize].as_ref());
        entry.map_or(0, |entry| entry.seed)
    }

    /// What the addresses below a root start from.
    pub(crate) fn store_seed_of(&self, root: u32) -> Option<PageAddress> {
        let slot = *self.by_root.get(&root)?;
        self.slots[slot as usize].as_ref()?.store_seed
    }

    pub(crate) fn roots(&self) -> impl Iterator<Item = u32> {
        self.slots.iter().flatten().map(|entry| entry.root)
    }

    /// Whether a slot is free without taking one away.
    pub(crate) fn has_room(&self) -> bool {
        self.len() < self.limit as usize
    }

    /// The next namespace for which `unused(root)` holds; looked for in turn, once around.
    pub(crate) fn find_unused(&mut self, unused: impl Fn(u32) -> bool) -> Option<(u32, u32)> {
        for _ in 0..self.slots.len() {
            let at = self.hand;
            self.hand = (at + 1) % self.slots.len();
            if let Some(entry) = &self.slots[at]
                && unused(entry.root)
            {
                return Some((crate::tree::narrow(at), entry.root));
            }
        }
        None
    }

    /// Forgets the namespace in `slot`.
    pub(crate) fn remove(&mut self, slot: u32) {
        let entry = self.slots[slot as usize]
            .take()
            .expect("the slot is in use");
        self.by_root.remove(&entry.root);
        if let Some(key) = entry.key {
            self.by_key.remove(&key);
        }
        // A slot whose generations are used up stays empty for ever.
        if self.generations[slot as usize] < u32::MAX {
            self.free.push(slot);
        }
    }

    /// A new namespace.
    pub(crate) fn insert(&mut self, key: Option<NamespaceKey>, root: u32) -> NamespaceId {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.generations.push(0);
            crate::tree::narrow(self.slots.len() - 1)
        });
        let generation = &mut self.generations[slot as usize];
        *generation += 1;
        let id = NamespaceId::new(slot, *generation);
        if let Some(key) = &key {
            self.by_key.insert(key.clone(), id);
        }
        // A nameless namespace is unlike every other one.
        let seed = key.as_ref().map_or(id.get(), namespace_seed);
        let generation = *generation;
        let store_seed = key.as_ref().map(|key| {
            let (lora, salt) = (key.lora.as_deref(), key.salt.as_deref());
            PageAddress::seed(&[Some(&key.model), Some(&key.numerics), lora, salt])
        });
        self.slots[slot as usize] = Some(Entry {
            generation,
            root,
            key,
            seed,
            store_seed,
        });
        self.by_root.insert(root, slot);
        id
    }

    pub(crate) const fn full(&self) -> CacheError {
        CacheError::NamespacesFull { limit: self.limit }
    }
}

impl PrefixCache {
    /// The id of a namespace, new or known.
    ///
    /// # Errors
    /// `max_namespaces` hold cached or leased pages.
    pub fn namespace(&mut self, key: &NamespaceKey) -> Result<NamespaceId, CacheError> {
        if let Some(id) = self.namespaces.find(key) {
            return Ok(id);
        }
        if !self.namespaces.has_room() && !self.drop_unused_namespace() {
            return Err(self.namespaces.full());
        }
        let root = self.add_root();
        Ok(self.namespaces.insert(Some(key.clone()), root))
    }

    /// The name of a namespace, as long as it is known.
    pub fn namespace_key(&self, ns: NamespaceId) -> Option<&NamespaceKey> {
        self.namespaces.key_of(ns)
    }

    fn add_root(&mut self) -> u32 {
        let root = self.tree.add_root();
        for tier in &mut self.tiers {
            tier.add_root(root);
        }
        root
    }

    /// The root of a namespace. A namespace that was dropped gets a fresh one without a name,
    /// where nothing is cached.
    pub(crate) fn root_or_orphan(&mut self, ns: NamespaceId) -> (NamespaceId, u32) {
        if let Some(root) = self.namespaces.root(ns) {
            return (ns, root);
        }
        // Held by live leases, so bounded by them; unused ones make place.
        if !self.namespaces.has_room() {
            self.drop_unused_namespace();
        }
        let root = self.add_root();
        (self.namespaces.insert(None, root), root)
    }

    fn drop_unused_namespace(&mut self) -> bool {
        let (tree, tiers) = (&self.tree, &self.tiers);
        let unused = |root: u32| {
            tree.node(root).is_leaf() && tiers.iter().all(|tier| !tier.span(root).is_kept())
        };
        let Some((slot, root)) = self.namespaces.find_unused(unused) else {
            return false;
        };
        self.namespaces.remove(slot);
        self.tree.remove_root(root);
        for tier in &mut self.tiers {
            tier.forget(root);
        }
        true
    }
}
