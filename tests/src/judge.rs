//! What callers hear, and whether it is right: order of events, text, usage, pins.

use rootstock_scheduler::{Emit, FinishReason, RequestId, Usage};

use crate::planted::Planted;
use crate::report::Event;
use crate::sim::Sim;
use crate::text;

impl Sim {
    /// Events reach their clients.
    pub(crate) fn hear(&mut self) -> Result<(), String> {
        let mut events = Vec::new();
        self.core.drain_emits(&mut events);
        for emit in self.tampered(events) {
            self.report.events += 1;
            let id = emit.request();
            let Some(client) = self.clients.get_mut(&id) else {
                return Err(format!("an event of nobody: {emit:?}"));
            };
            if client.reason.is_some() || client.new.label != emit.label() {
                return Err(format!(
                    "after the final event, or to the wrong caller: {emit:?}"
                ));
            }
            match emit {
                Emit::Started { .. } if client.started.is_some() => {
                    return Err(format!("request {} started twice", id.0));
                }
                Emit::Started { cached, .. } => client.started = Some(cached),
                Emit::Tokens { tokens, .. } => {
                    if tokens.is_empty() || client.started.is_none() {
                        return Err(format!("request {}: no tokens, or before the start", id.0));
                    }
                    client.got.extend(tokens);
                }
                Emit::Final { reason, usage, .. } => {
                    client.reason = Some(reason);
                    self.live.retain(|&other| other != id);
                    self.log(Event::Ended(id, reason));
                    *self.report.ended.entry(format!("{reason:?}")).or_default() += 1;
                    self.judge(id, reason, usage)?;
                }
            }
        }
        Ok(())
    }

    /// Events as they reach their callers: as they are, but for what is planted.
    fn tampered(&mut self, events: Vec<Emit>) -> Vec<Emit> {
        let mut out = Vec::new();
        for mut emit in events {
            if matches!(emit, Emit::Final { .. }) {
                if !self.is_time(|p| matches!(p, Planted::LostFinal(_))) {
                    out.push(emit);
                }
                continue;
            }
            if !matches!(emit, Emit::Tokens { .. }) {
                out.push(emit);
                continue;
            }
            if self.is_time(|p| matches!(p, Planted::LostEvent(_))) {
                continue;
            }
            let changed = self.is_time(|p| matches!(p, Planted::ChangedToken(_)));
            if let Emit::Tokens { tokens, .. } = &mut emit
                && let Some(token) = tokens.first_mut().filter(|_| changed)
            {
                *token ^= 1;
            }
            if self.is_time(|p| matches!(p, Planted::DoubledEvent(_))) {
                out.push(emit.clone());
            }
            out.push(emit);
        }
        out
    }

    /// Compares what a request said with what it says alone.
    fn judge(&mut self, id: RequestId, reason: FinishReason, usage: Usage) -> Result<(), String> {
        let client = &self.clients[&id];
        let limit = self.swarm.scheduler.max_model_len;
        let (alone, alone_reason) = text::alone(&client.new, limit);
        let bad = |what: &str| Err(format!("request {} ended {reason:?}: {what}", id.0));
        if !alone.starts_with(&client.got) {
            return bad(&format!("said {:?}, alone {alone:?}", client.got));
        }
        let whole = client.got.len() == alone.len();
        let prompt = client.new.tokens.len();
        let page = self.swarm.scheduler.page_tokens;
        let slots =
            self.swarm.cache.device_pages[usize::from(id.replica().0)] as usize * page as usize;
        match reason {
            FinishReason::Stop | FinishReason::Length if !whole || reason != alone_reason => {
                return bad(&format!(
                    "alone {alone_reason:?} after {} tokens",
                    alone.len()
                ));
            }
            FinishReason::OutOfPages if prompt + client.got.len() <= slots => {
                return bad(&format!(
                    "{prompt} + {} tokens, {slots} slots",
                    client.got.len()
                ));
            }
            FinishReason::TooManyPreemptions
                if usage.preemptions < self.swarm.scheduler.max_preemptions =>
            {
                return bad(&format!("after {} preemptions", usage.preemptions));
            }
            FinishReason::Failed(_) if !self.swarm.steps_may_fail() => {
                return bad("no step failed");
            }
            FinishReason::Displaced
            | FinishReason::Stop
            | FinishReason::Length
            | FinishReason::OutOfPages
            | FinishReason::TooManyPreemptions
            | FinishReason::Failed(_)
            | FinishReason::StopString
            | FinishReason::Aborted
            | FinishReason::Expired => {}
        }
        let cached = usage.cached.total();
        if usage.prompt_tokens as usize != prompt
            || usage.completion_tokens as usize != client.got.len()
            || cached as usize >= prompt
            || !cached.is_multiple_of(page)
        {
            return bad(&format!(
                "usage {usage:?} for {prompt} + {}",
                client.got.len()
            ));
        }
        if client.started.unwrap_or_default() != usage.cached {
            return bad("the usage and the start count other cached tokens");
        }
        self.judge_pins(id, &usage)?;
        let client = &self.clients[&id];
        if self.conversations.len() >= 16 {
            self.conversations.pop_front();
        }
        let mut tokens = client.new.tokens.clone();
        tokens.extend(&client.got);
        if tokens.len() < slots {
            self.conversations.push_back((client.new.ns, tokens));
        }
        Ok(())
    }

    /// A request that has said something has had its pins answered; what was granted is watched.
    fn judge_pins(&mut self, id: RequestId, usage: &Usage) -> Result<(), String> {
        let client = &self.clients[&id];
        let (asked, report) = (client.new.hints.pins.clone(), usage.pins);
        let wanted = if client.got.is_empty() {
            0
        } else {
            asked.len()
        };
        let told = report.accepted + report.clipped + report.rejected;
        if report.asked != told || (report.asked as usize) < wanted {
            return Err(format!("request {}: {asked:?} pins, told {report:?}", id.0));
        }
        let &[(_, ttl)] = asked.as_slice() else {
            return Ok(());
        };
        if client.pin_epoch != self.pin_epoch() {
            return Ok(());
        }
        let client = &self.clients[&id];
        let (ns, tokens, since) = (client.new.ns, client.new.tokens.clone(), client.arrival);
        self.promise(ns, &tokens, report.pages, since, ttl.seconds);
        Ok(())
    }
}
