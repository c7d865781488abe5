//! A look at the core, or a verb on it, between two turns of the core thread.

use std::fmt;

use rootstock::ServingCore;
use rootstock::memory::Nanos;
use rootstock::radix::NamespaceKey;

use super::Service;
use super::core_thread::Message;

/// The engine is lost, or the service is going down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the engine is dead")]
pub struct EngineGone;

/// What a visitor sees.
#[derive(Debug)]
pub struct Visit<'a> {
    /// The core.
    pub core: &'a mut ServingCore,
    /// Model and numerics: the part that all namespaces have in common.
    pub namespace: &'a NamespaceKey,
    /// The time of the core.
    pub now: Nanos,
}

/// A visitor on its way.
pub(super) struct Visitor(pub(super) Box<dyn FnOnce(Visit<'_>) + Send>);

impl fmt::Debug for Visitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Visitor")
    }
}

impl Service {
    /// Runs `visit` on the core thread, which does nothing else meanwhile: it should take
    /// microseconds. Verbs on cached content are in order; requests go through
    /// [`Service::submit`], which keeps their tickets.
    ///
    /// # Errors
    /// There is no core to visit.
    pub async fn visit<T: Send + 'static>(
        &self,
        visit: impl FnOnce(Visit<'_>) -> T + Send + 'static,
    ) -> Result<T, EngineGone> {
        let (reply, answer) = flume::bounded(1);
        let visitor = Visitor(Box::new(move |at| {
            // A caller that is gone needs no answer.
            let _gone = reply.try_send(visit(at));
        }));
        let sent = self.inner.inbox.send_async(Message::Visit(visitor)).await;
        sent.map_err(|_| EngineGone)?;
        answer.recv_async().await.map_err(|_| EngineGone)
    }
}
