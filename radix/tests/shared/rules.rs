//! The rules of the model: what is cached, who goes first, what is free.

use super::{Entry, Prefix, Request, World};
use rootstock_memory::PageId;
use rootstock_radix::PolicyKind;

impl World {
    pub(super) fn longest(&self, request: &Request, cap: usize) -> usize {
        let cached = &self.cached[request.replica];
        let has = |&pages: &usize| cached.contains_key(&request.prefix(pages, self.page_tokens));
        (1..=cap).take_while(has).count()
    }

    pub(super) fn hit(&mut self, replica: usize, prefix: &Prefix) {
        self.common
            .get_mut(prefix)
            .expect("cached pages are known")
            .hits += 1;
        self.cached[replica]
            .get_mut(prefix)
            .expect("it is cached")
            .spent = false;
    }

    pub(super) fn raise(&mut self, at: usize, priority: i32) {
        let request = &self.requests[at];
        for pages in 1..=request.covered {
            let prefix = request.prefix(pages, self.page_tokens);
            let common = self
                .common
                .get_mut(&prefix)
                .expect("leased pages are known");
            common.priority = common.priority.max(priority);
        }
    }

    /// How many prefixes one page longer are on a device.
    pub(super) fn children(&self, replica: usize, prefix: &Prefix) -> usize {
        let len = prefix.1.len() + self.page_tokens;
        let follows = |(ns, tokens): &&Prefix| {
            *ns == prefix.0 && tokens.len() == len && tokens.starts_with(&prefix.1)
        };
        self.cached[replica].keys().filter(follows).count()
    }

    pub(super) fn forget(&mut self, replica: usize, prefix: &Prefix) -> PageId {
        let entry = self.cached[replica].remove(prefix).expect("it is cached");
        if !self.cached.iter().any(|cached| cached.contains_key(prefix)) {
            self.common.remove(prefix);
        }
        entry.page
    }

    /// Who goes first: the least valuable page that nothing keeps and that no page follows.
    pub(super) fn victim(&self, replica: usize) -> Option<Prefix> {
        let cached = &self.cached[replica];
        let free = |prefix: &Prefix| {
            let followed = self.children(replica, prefix) > 0;
            let leased = self
                .requests
                .iter()
                .any(|one| one.covers(prefix, replica, self.page_tokens));
            !followed && !leased
        };
        let key = |prefix: &Prefix, entry: &Entry| match self.setup.policy {
            // What was spent last goes first.
            _ if entry.spent && self.setup.policy == PolicyKind::Lru => (0, u64::MAX - entry.stamp),
            PolicyKind::Lru => (1, entry.stamp),
            _ if entry.spent => (i64::MIN, entry.stamp),
            PolicyKind::Priority | _ => (self.common[prefix].priority.into(), entry.stamp),
        };
        let all = cached.iter().filter(|(prefix, _)| free(prefix));
        all.min_by_key(|(prefix, entry)| key(prefix, entry))
            .map(|(prefix, _)| prefix.clone())
    }

    pub(super) fn model_make_room(&mut self, replica: usize, n: usize) -> bool {
        if self.free(replica) + self.evictable(replica) < n {
            return false;
        }
        while self.free(replica) < n {
            let prefix = self.victim(replica).expect("evictable pages have a victim");
            self.forget(replica, &prefix);
        }
        true
    }

    pub(super) fn leased(&self, replica: usize) -> usize {
        let leased = |prefix: &&Prefix| {
            self.requests
                .iter()
                .any(|one| one.covers(prefix, replica, self.page_tokens))
        };
        self.cached[replica].keys().filter(leased).count()
    }

    pub(super) fn evictable(&self, replica: usize) -> usize {
        self.cached[replica].len() - self.leased(replica)
    }

    pub(super) fn held(&self, replica: usize) -> usize {
        let kept = self.requests.iter().filter(|one| one.replica == replica);
        kept.map(|one| one.kept.len()).sum::<usize>() + self.waiting[replica].len()
    }

    pub(super) fn free(&self, replica: usize) -> usize {
        self.total(replica) - self.cached[replica].len() - self.held(replica)
    }

    pub(super) fn assert_unowned(&self, replica: usize, ids: &[PageId]) {
        for id in ids {
            let cached = self.cached[replica].values().any(|entry| entry.page == *id);
            let kept = self
                .requests
                .iter()
                .any(|one| one.replica == replica && one.kept.values().any(|kept| kept == id));
            let waiting = self.waiting[replica]
                .iter()
                .any(|(_, waiting)| waiting == id);
            assert!(
                !cached && !kept && !waiting,
                "page {} was handed out twice",
                id.get()
            );
        }
    }
}
