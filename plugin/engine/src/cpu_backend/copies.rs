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
