//! Plans that wait for the worker: reads and looks go before writes, because requests wait for
//! them; nothing goes before a clear that came earlier.

use crate::{StoreOp, StorePlan};
use std::collections::VecDeque;
use std::sync::mpsc::Receiver;
use tokio::time::Instant;

/// A plan and when it came.
#[derive(Debug)]
pub(super) struct Submitted {
    pub(super) plan: StorePlan,
    pub(super) at: Instant,
}

impl Submitted {
    pub(super) fn now(plan: StorePlan) -> Self {
        Self {
            plan,
            at: Instant::now(),
        }
    }
}

/// What came and was not begun.
#[derive(Debug)]
pub(super) struct Queue {
    coming: Receiver<Submitted>,
    waiting: VecDeque<Submitted>,
    limit: usize,
}

impl Queue {
    /// Takes `limit` plans out of the channel at most.
    pub(super) const fn new(coming: Receiver<Submitted>, limit: usize) -> Self {
        Self {
            coming,
            waiting: VecDeque::new(),
            limit,
        }
    }

    /// The plan to carry out next; waits for one. None when no more will come.
    pub(super) fn next(&mut self) -> Option<Submitted> {
        if self.waiting.is_empty() {
            self.waiting.push_back(self.coming.recv().ok()?);
        }
        let read = self.next_read();
        read.or_else(|| self.waiting.pop_front())
    }

    /// A plan that somebody waits for, if there is one.
    pub(super) fn next_read(&mut self) -> Option<Submitted> {
        let room = self.limit.saturating_sub(self.waiting.len());
        self.waiting.extend(self.coming.try_iter().take(room));
        let clear = |one: &Submitted| one.plan.op == StoreOp::Clear;
        let before = self.waiting.iter().take_while(|one| !clear(one));
        let read = |one: &Submitted| matches!(one.plan.op, StoreOp::Read | StoreOp::Look);
        let at = before.into_iter().position(read)?;
        self.waiting.remove(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CopyId, PageAddress};
    use std::sync::mpsc::sync_channel;

    #[test]
    fn reads_go_before_writes_and_nothing_goes_before_an_earlier_clear() {
        let (send, coming) = sync_channel(9);
        let ops = [
            StoreOp::Write,
            StoreOp::Write,
            StoreOp::Read,
            StoreOp::Look,
            StoreOp::Clear,
            StoreOp::Read,
        ];
        for (id, op) in (0..).zip(ops) {
            let plan = StorePlan {
                id: CopyId(id),
                op,
                namespace: PageAddress::seed(&[]),
                pages: Box::default(),
            };
            send.send(Submitted::now(plan)).unwrap();
        }
        drop(send);
        let mut queue = Queue::new(coming, 9);
        let order: Vec<u64> = std::iter::from_fn(|| Some(queue.next()?.plan.id.0)).collect();
        assert_eq!(order, [2, 3, 0, 1, 4, 5]);
    }
}
