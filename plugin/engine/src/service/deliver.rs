//! From the core's events to the channels of the tickets.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rootstock::memory::Nanos;
use rootstock::scheduler::{Class, Emit, FinishReason, RequestId, Usage};

use super::core_thread::CoreThread;
use super::request::Event;
use super::stats::Stats;
use super::wish::Control;

/// A request without its final event yet.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) request: RequestId,
    pub(super) control: Arc<Control>,
    /// Not a client's: nothing of it is counted.
    speculative: bool,
    events: flume::Sender<Event>,
    first_token: Option<Nanos>,
    tokens: u64,
}

impl Live {
    pub(super) fn new(
        request: RequestId,
        events: flume::Sender<Event>,
        control: Arc<Control>,
        class: Class,
    ) -> Self {
        Self {
            request,
            control,
            speculative: class == Class::Speculative,
            events,
            first_token: None,
            tokens: 0,
        }
    }
}

impl CoreThread {
    /// Counts all events so far, publishes the counters, then hands the events to their readers:
    /// whoever has seen an event finds it in the counters.
    pub(super) fn deliver(&mut self, now: Nanos) {
        let mut emits = std::mem::take(&mut self.emits);
        let mut outgoing = std::mem::take(&mut self.outgoing);
        self.core.drain_emits(&mut emits);
        for emit in emits.drain(..) {
            outgoing.extend(self.event_of(emit, now));
        }
        self.publish(true);
        for (reader, event) in outgoing.drain(..) {
            match reader.try_send(event) {
                Ok(()) => {}
                // The ticket is gone; its drop has asked for the abort already.
                Err(flume::TrySendError::Disconnected(_)) => {}
                Err(flume::TrySendError::Full(_)) => {
                    self.stats.events_lost += 1;
                    tracing::error!("an event found its bounded channel full");
                }
            }
        }
        self.emits = emits;
        self.outgoing = outgoing;
    }

    /// Counts an event; None when its request is not live.
    fn event_of(&mut self, emit: Emit, now: Nanos) -> Option<(flume::Sender<Event>, Event)> {
        let label = emit.label();
        let live = self.live.get_mut(&label)?;
        let mut uncounted = Stats::default();
        let stats = match live.speculative {
            true => &mut uncounted,
            false => &mut self.stats,
        };
        let event = match emit {
            Emit::Started {
                request,
                cached,
                prompt_tokens,
                ..
            } => {
                stats.prompt_tokens += u64::from(prompt_tokens);
                stats.cached.add(cached);
                Event::Started {
                    cached,
                    prompt_tokens,
                    replica: self.core.replica_of(request),
                }
            }
            Emit::Tokens {
                tokens, logprobs, ..
            } => {
                stats.generated_tokens += tokens.len() as u64;
                live.tokens += tokens.len() as u64;
                live.first_token.get_or_insert(now);
                Event::Tokens { tokens, logprobs }
            }
            Emit::Final { reason, usage, .. } => {
                stats.finished.count(reason);
                stats.queue_s.observe(usage.queue_ns);
                if let Some(ttft) = usage.ttft_ns {
                    stats.ttft_s.observe(ttft);
                }
                if let (Some(first), 2..) = (live.first_token, live.tokens) {
                    stats
                        .tpot_s
                        .observe(now.saturating_sub(first) / (live.tokens - 1));
                }
                Event::Final { reason, usage }
            }
        };
        let reader = live.events.clone();
        if matches!(event, Event::Final { .. }) {
            live.control.set_done();
            if let Some(masks) = self.shared.masks.get() {
                masks.end(live.request);
            }
            self.live.remove(&label);
        }
        Some((reader, event))
    }

    /// Gives every live request a final event without asking the core, which is gone.
    pub(super) fn end_all_without_core(&mut self, reason: FinishReason) {
        for live in std::mem::take(&mut self.live).into_values() {
            live.control.set_done();
            self.stats.finished.count(reason);
            let _gone = live.events.try_send(Event::Final {
                reason,
                usage: Usage::default(),
            });
        }
        self.shared.dead.store(true, Ordering::Release);
    }
}
