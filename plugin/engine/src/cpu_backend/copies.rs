//! Copies between the device arena and the host arena, on a worker thread.
//!
//! The queue is bounded: a plan that finds it full comes back to the caller. A copy takes both
//! arenas for one page at a time, device before host, so it never holds up a step for longer
//! than a page takes. Each accepted plan gets exactly one acknowledgement, failed or not.

use std::sync::PoisonError;
use std::thread::JoinHandle;

use rootstock::memory::{CopyDone, CopyEngine, CopyPlan, Full, KvArena, PageId, TierId};

use super::SharedArena;
use crate::error::EngineError;

/// The copy engine of a CPU replica.
#[derive(Debug)]
pub struct ArenaCopies {
    plans: Option<flume::Sender<CopyPlan>>,
    done: flume::Receiver<CopyDone>,
    waiting: usize,
    limit: usize,
    worker: Option<JoinHandle<()>>,
}

impl ArenaCopies {
    /// Starts the worker. Without a host arena every copy is answered as failed.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(
        device: SharedArena,
        host: Option<SharedArena>,
        limit: usize,
    ) -> Result<Self, EngineError> {
        let limit = limit.max(1);
        let (plans, work) = flume::bounded::<CopyPlan>(limit);
        let (acknowledge, done) = flume::bounded(limit);
        let run = move || {
            for plan in work {
                let ok = copy(&device, host.as_ref(), &plan);
                if acknowledge.send(CopyDone { id: plan.id, ok }).is_err() {
                    break;
                }
            }
        };
        let worker = std::thread::Builder::new()
            .name("rootstock-copy".to_owned())
            .spawn(run)
            .map_err(|source| EngineError::Thread {
                thread: "rootstock-copy",
                source,
            })?;
        Ok(Self {
            plans: Some(plans),
            done,
            waiting: 0,
            limit,
            worker: Some(worker),
        })
    }
}

impl CopyEngine for ArenaCopies {
    fn submit(&mut self, plan: CopyPlan) -> Result<(), (CopyPlan, Full)> {
        if self.waiting >= self.limit {
            return Err((plan, Full));
        }
        let Some(plans) = &self.plans else {
            return Err((plan, Full));
        };
        match plans.try_send(plan) {
            Ok(()) => {
                self.waiting += 1;
                Ok(())
            }
            Err(flume::TrySendError::Full(plan) | flume::TrySendError::Disconnected(plan)) => {
                Err((plan, Full))
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<CopyDone>) {
        let before = done.len();
        done.extend(self.done.try_iter());
        self.waiting -= done.len() - before;
    }
}

impl Drop for ArenaCopies {
    fn drop(&mut self) {
        self.plans = None;
        // The acknowledgements still waiting fit their channel, so the worker always ends.
        if let Some(worker) = self.worker.take()
            && worker.join().is_err()
        {
            tracing::error!("the copy thread panicked");
        }
    }
}

/// True when every page was copied.
fn copy(device: &SharedArena, host: Option<&SharedArena>, plan: &CopyPlan) -> bool {
    let Some(host) = host else { return false };
    let down = match (plan.from.0, plan.to.0) {
        (TierId::Device(_), TierId::Host) => true,
        (TierId::Host, TierId::Device(_)) => false,
        _ => return false,
    };
    if plan.from.1.len() != plan.to.1.len() {
        return false;
    }
    for (&from, &to) in plan.from.1.iter().zip(&plan.to.1) {
        let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
        let mut host = host.lock().unwrap_or_else(PoisonError::into_inner);
        let copied = if down {
            page(&device, from, &mut host, to, plan)
        } else {
            page(&host, from, &mut device, to, plan)
        };
        if !copied {
            return false;
        }
    }
    true
}

fn page(from: &KvArena, source: PageId, to: &mut KvArena, target: PageId, plan: &CopyPlan) -> bool {
    let fits = |arena: &KvArena, page: PageId| page.get() >= 1 && page.get() <= arena.total();
    let layers = plan.layers.start <= plan.layers.end
        && u32::from(plan.layers.end) <= from.layout().layers();
    if !fits(from, source) || !fits(to, target) || !layers || from.layout() != to.layout() {
        return false;
    }
    to.copy_from(target, from, source, plan.layers.clone());
    true
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use rootstock::memory::{
        CopyClass, CopyId, KvDtype, KvLayout, LayoutOrder, LayoutSpec, ReplicaId,
    };

    use super::*;

    const DEVICE: TierId = TierId::Device(ReplicaId(0));

    fn arena(pages: u32) -> SharedArena {
        let layout = KvLayout::new(LayoutSpec {
            order: LayoutOrder::PageFirst,
            page_tokens: 2,
            layers: 3,
            kv_heads: 1,
            head_dim: 4,
            dtype: KvDtype::F16,
        });
        Arc::new(Mutex::new(KvArena::new(layout.unwrap(), pages).unwrap()))
    }

    fn fill(arena: &SharedArena, page: u32, byte: u8) {
        let mut arena = arena.lock().unwrap();
        arena.page_mut(PageId::new(page)).fill(byte);
    }

    fn is_filled(arena: &SharedArena, page: u32, byte: u8) -> bool {
        let arena = arena.lock().unwrap();
        arena
            .page(PageId::new(page))
            .iter()
            .all(|&found| found == byte)
    }

    fn plan(id: u64, from: (TierId, &[u32]), to: (TierId, &[u32])) -> CopyPlan {
        let pages = |ids: &[u32]| ids.iter().map(|&id| PageId::new(id)).collect();
        CopyPlan {
            id: CopyId(id),
            from: (from.0, pages(from.1)),
            to: (to.0, pages(to.1)),
            layers: 0..3,
            class: CopyClass::Demote,
            deadline: None,
        }
    }

    /// Submits one plan and gives its acknowledgement.
    fn run(copies: &mut ArenaCopies, plan: CopyPlan) -> CopyDone {
        copies.submit(plan).unwrap();
        let mut done = acknowledged(copies, 1);
        assert_eq!(done.len(), 1, "one acknowledgement a plan");
        done.remove(0)
    }

    /// Polls until `n` acknowledgements are there, or for ten seconds.
    fn acknowledged(copies: &mut ArenaCopies, n: usize) -> Vec<CopyDone> {
        let mut done = Vec::new();
        for _ in 0..10_000 {
            copies.poll(&mut done);
            if done.len() >= n {
                break;
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
        done
    }

    #[test]
    fn pages_go_down_and_come_back_up_elsewhere() {
        let (device, host) = (arena(8), arena(4));
        fill(&device, 3, 33);
        fill(&device, 7, 77);
        let mut copies =
            ArenaCopies::start(Arc::clone(&device), Some(Arc::clone(&host)), 4).unwrap();
        let down = plan(1, (DEVICE, &[3, 7]), (TierId::Host, &[4, 1]));
        assert!(run(&mut copies, down).ok);
        assert!(is_filled(&host, 4, 33) && is_filled(&host, 1, 77));
        let up = plan(2, (TierId::Host, &[1]), (DEVICE, &[2]));
        assert!(run(&mut copies, up).ok);
        assert!(is_filled(&device, 2, 77) && is_filled(&device, 3, 33));
    }

    #[test]
    fn what_cannot_be_copied_is_answered_as_failed_and_touches_nothing() {
        let (device, host) = (arena(4), arena(2));
        fill(&host, 2, 22);
        let mut copies =
            ArenaCopies::start(Arc::clone(&device), Some(Arc::clone(&host)), 4).unwrap();
        let bad = [
            plan(1, (DEVICE, &[5]), (TierId::Host, &[2])),
            plan(2, (DEVICE, &[1]), (TierId::Host, &[3])),
            plan(3, (DEVICE, &[0]), (TierId::Host, &[2])),
            plan(4, (DEVICE, &[1, 2]), (TierId::Host, &[2])),
            plan(5, (DEVICE, &[1]), (DEVICE, &[2])),
            CopyPlan {
                layers: 0..4,
                ..plan(6, (DEVICE, &[1]), (TierId::Host, &[2]))
            },
        ];
        for plan in bad {
            let id = plan.id;
            assert_eq!(run(&mut copies, plan), CopyDone { id, ok: false });
        }
        assert!(is_filled(&host, 2, 22));
        let mut alone = ArenaCopies::start(device, None, 4).unwrap();
        let plan = plan(7, (DEVICE, &[1]), (TierId::Host, &[1]));
        assert!(!run(&mut alone, plan).ok, "there is no host tier");
    }

    #[test]
    fn a_full_queue_gives_the_plan_back_and_loses_no_acknowledgement() {
        let (device, host) = (arena(4), arena(4));
        let mut copies =
            ArenaCopies::start(Arc::clone(&device), Some(Arc::clone(&host)), 2).unwrap();
        let held = device.lock().unwrap();
        let mut accepted = 0;
        let refused = (1..=9)
            .find(|&id| {
                let plan = plan(id, (DEVICE, &[1]), (TierId::Host, &[1]));
                let refused = copies
                    .submit(plan)
                    .err()
                    .is_some_and(|(plan, _)| plan.id.0 == id);
                accepted += u32::from(!refused);
                refused
            })
            .is_some();
        assert!(refused && accepted == 2, "{accepted} accepted");
        drop(held);
        let done = acknowledged(&mut copies, 2);
        assert_eq!(
            done.iter().map(|done| done.id.0).collect::<Vec<_>>(),
            [1, 2]
        );
    }
}
