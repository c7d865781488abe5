//! Which replica each session is bound to.

use std::collections::BTreeMap;

use rootstock_memory::Nanos;

/// Sessions remembered at a time; the longest unused go first.
const SESSIONS_MAX: usize = 65_536;

#[derive(Clone, Copy, Debug)]
struct Binding {
    replica: usize,
    active: u32,
    used_at: Nanos,
}

/// The bindings. One with requests under way does not expire; idle ones do after the lifetime.
#[derive(Debug)]
pub(super) struct Sessions {
    ttl_ns: u64,
    bound: BTreeMap<String, Binding>,
}

impl Sessions {
    /// Bindings that last for `ttl_s` idle seconds; 0 is none at all.
    pub(super) fn new(ttl_s: u32) -> Self {
        Self {
            ttl_ns: u64::from(ttl_s) * 1_000_000_000,
            bound: BTreeMap::new(),
        }
    }

    /// Where a session is, as long as it is bound.
    pub(super) fn replica_of(&self, session: &str, now: Nanos) -> Option<usize> {
        let binding = self.bound.get(session)?;
        let idle_ns = now.saturating_sub(binding.used_at);
        (binding.active > 0 || idle_ns <= self.ttl_ns).then_some(binding.replica)
    }

    /// A request of the session goes to a replica.
    pub(super) fn begin(&mut self, session: &str, replica: usize, now: Nanos) {
        if self.ttl_ns == 0 || !self.has_room(session) {
            return;
        }
        let binding = self.bound.entry(session.to_owned()).or_insert(Binding {
            replica,
            active: 0,
            used_at: now,
        });
        binding.replica = replica;
        binding.active += 1;
        binding.used_at = now;
    }

    /// A request of the session has ended.
    pub(super) fn end(&mut self, session: &str, now: Nanos) {
        if let Some(binding) = self.bound.get_mut(session) {
            binding.active = binding.active.saturating_sub(1);
            binding.used_at = now;
        }
    }

    /// The request that bound a session has gone to another replica.
    pub(super) fn follow(&mut self, session: &str, replica: usize) {
        if let Some(binding) = self.bound.get_mut(session) {
            binding.replica = replica;
        }
    }

    fn has_room(&mut self, session: &str) -> bool {
        if self.bound.len() < SESSIONS_MAX || self.bound.contains_key(session) {
            return true;
        }
        let mut ages: Vec<(bool, Nanos)> = self
            .bound
            .values()
            .map(|binding| (binding.active > 0, binding.used_at))
            .collect();
        ages.sort_unstable();
        let (_, median) = ages[ages.len() / 2];
        self.bound
            .retain(|_, binding| binding.active > 0 || binding.used_at > median);
        self.bound.len() < SESSIONS_MAX
    }
}
