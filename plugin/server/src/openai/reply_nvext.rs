//! The `nvext` object of answers: only what `nvext.extra_fields` names, plus `ignored_fields`
//! whenever something of the request's `nvext` was not understood and any field was asked for.

use rootstock::hints::{ParsedHints, WHOLE_PROMPT};
use rootstock::radix::Hints;
use rootstock::scheduler::PinReport;
use serde_json::{Map, Value, json};

use crate::chat::derived::Kind;
use crate::control::why::Finding;
use crate::openai::generation::{ChoiceUsage, Finish, Generation};

/// Which fields were asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NvextWish {
    timing: bool,
    worker_id: bool,
    completion_token_ids: bool,
    prompt_token_ids: bool,
    stop_reason: bool,
    cache_report: bool,
    /// Why tokens of the first prompt were not cached.
    miss: Option<Finding>,
    /// What came of `kv_hints` in the request.
    kv_hints: Option<Value>,
    ignored: Option<Vec<String>>,
    asks_hints: bool,
    /// What the hints of the request came to.
    hints: Option<Value>,
    received_ms: u64,
    /// The first prompt's tokens, kept only when asked for.
    prompt_ids: Vec<u32>,
}

impl NvextWish {
    /// Reads the wishes of a request that came at `received_ms` (since 1970).
    pub fn new(parsed: &ParsedHints, received_ms: u64, prompt: &[u32]) -> NvextWish {
        let asked = |name: &str| parsed.extra_fields.iter().any(|field| field == name);
        let wants_any = !parsed.extra_fields.is_empty();
        NvextWish {
            timing: asked("timing"),
            worker_id: asked("worker_id"),
            completion_token_ids: asked("completion_token_ids"),
            prompt_token_ids: asked("prompt_token_ids"),
            stop_reason: asked("stop_reason") || asked("detailed_finish_reason"),
            cache_report: asked("cache_report"),
            miss: None,
            kv_hints: None,
            asks_hints: asked("hints"),
            hints: None,
            ignored: (asked("ignored_fields") || wants_any && !parsed.hints.ignored.is_empty())
                .then(|| parsed.hints.ignored.clone()),
            received_ms,
            prompt_ids: if asked("prompt_token_ids") {
                prompt.to_vec()
            } else {
                Vec::new()
            },
        }
    }

    /// Takes what the hints came to: what applies after all limits, what was derived, and with them
    /// what was lowered or not understood.
    pub fn applied(&mut self, hints: &Hints, derived: &[Kind]) {
        self.hints = self.asks_hints.then(|| {
            let pins = hints.pins.iter().map(|(tokens, ttl)| {
                let tokens = (*tokens != WHOLE_PROMPT).then_some(*tokens);
                json!({"tokens": tokens, "seconds": ttl.seconds, "clamped": ttl.clamped})
            });
            let derived = derived.iter().map(|kind| kind.name());
            json!({
                "priority": hints.priority, "strict_priority": hints.strict,
                "queue_jump_s": hints.jump_s, "osl": hints.osl,
                "speculative_prefill": hints.speculate,
                "session": hints.program, "parent": hints.parent,
                "pins": pins.collect::<Vec<_>>(), "derived": derived.collect::<Vec<_>>(),
            })
        });
        if self.ignored.is_some() {
            self.ignored = Some(hints.ignored.clone());
        }
    }

    /// Takes what was found of the first prompt in the cache, for the report if it was asked for.
    pub fn explain(&mut self, finding: &Finding) {
        self.miss = self.cache_report.then(|| finding.clone());
        self.kv_hints.clone_from(&finding.kv_hints);
    }

    /// The object of a chunk with text: the worker, and the tokens since the last chunk.
    pub fn of_text(&self, ids: &[u32], replica: u16) -> Option<Value> {
        let mut object = Map::new();
        self.put_worker(&mut object, replica);
        self.put_ids(&mut object, ids);
        some(object)
    }

    /// The object of the last chunk of an answer.
    pub fn of_end(&self, finish: &Finish, ids: &[u32], usage: ChoiceUsage) -> Option<Value> {
        let mut object = Map::new();
        self.put_worker(&mut object, usage.replica);
        self.put_ids(&mut object, ids);
        self.put_end(&mut object, finish, usage);
        some(object)
    }

    /// The object of a whole answer. Token ids are those of the only choice, as Dynamo has it.
    pub fn of_whole(&self, finish: &Finish, generation: &Generation) -> Option<Value> {
        let mut object = Map::new();
        self.put_worker(&mut object, generation.usage(0).replica);
        if generation.len() == 1 {
            self.put_ids(&mut object, generation.ids(0));
        }
        self.put_end(&mut object, finish, generation.usage(0));
        some(object)
    }

    /// Replicas are the workers here, and what KV events call ranks.
    fn put_worker(&self, object: &mut Map<String, Value>, replica: u16) {
        if self.worker_id {
            object.insert(
                "worker_id".into(),
                json!({"prefill_worker_id": replica, "prefill_dp_rank": replica,
                    "decode_worker_id": replica, "decode_dp_rank": replica}),
            );
        }
    }

    fn put_ids(&self, object: &mut Map<String, Value>, ids: &[u32]) {
        if self.completion_token_ids {
            object.insert("completion_token_ids".into(), ids.into());
        }
    }

    fn put_end(&self, object: &mut Map<String, Value>, finish: &Finish, usage: ChoiceUsage) {
        if self.prompt_token_ids {
            object.insert("prompt_token_ids".into(), self.prompt_ids.as_slice().into());
        }
        if self.stop_reason {
            object.insert("stop_reason".into(), stop_reason(finish));
        }
        if self.timing {
            object.insert("timing".into(), timing(self.received_ms, usage));
        }
        if self.cache_report {
            let mut report = sources(usage);
            let found = usage.cached.total();
            let miss = self.miss.as_ref().map(|miss| miss.seen(found).report());
            report.insert("miss".into(), miss.unwrap_or_default());
            if usage.pins.asked > 0 {
                report.insert("pins".into(), pins(&usage.pins));
            }
            object.insert("cache_report".into(), Value::Object(report));
        }
        if let Some(outcomes) = &self.kv_hints {
            object.insert("kv_hints".into(), outcomes.clone());
        }
        if let Some(hints) = &self.hints {
            object.insert("hints".into(), hints.clone());
        }
        if let Some(ignored) = &self.ignored {
            object.insert("ignored_fields".into(), ignored.as_slice().into());
        }
    }
}

/// What came of the pins of a request, over all of them.
fn pins(report: &PinReport) -> Value {
    json!({
        "asked": report.asked, "accepted": report.accepted, "clipped": report.clipped,
        "rejected": report.rejected, "pages": report.pages, "asked_pages": report.asked_pages,
    })
}

/// Where the tokens of a prompt came from.
fn sources(usage: ChoiceUsage) -> Map<String, Value> {
    let cached = usage.cached;
    let found = cached.device + cached.host + cached.storage;
    let parts = [
        ("device_tokens", cached.device),
        ("host_tokens", cached.host),
        ("storage_tokens", cached.storage),
        ("computed_tokens", usage.prompt_tokens.saturating_sub(found)),
    ];
    let parts = parts.map(|(name, tokens)| (name.to_owned(), tokens.into()));
    parts.into_iter().collect()
}

fn some(object: Map<String, Value>) -> Option<Value> {
    (!object.is_empty()).then_some(Value::Object(object))
}

fn stop_reason(finish: &Finish) -> Value {
    match finish {
        Finish::StopString(text) => json!(text),
        Finish::StopToken(token) => json!(token),
        Finish::Length => Value::Null,
        Finish::OutOfPages => json!("out_of_pages"),
    }
}

fn timing(received_ms: u64, usage: ChoiceUsage) -> Value {
    let ms = |ns: u64| {
        #[expect(clippy::cast_precision_loss, reason = "microseconds are enough")]
        let ms = (ns / 1_000) as f64 / 1_000.0;
        ms
    };
    let ttft_ns = usage.ttft_ns.unwrap_or(usage.queue_ns);
    json!({
        "request_received_ms": received_ms,
        "prefill_wait_time_ms": ms(usage.queue_ns),
        "prefill_time_ms": ms(ttft_ns.saturating_sub(usage.queue_ns)),
        "ttft_ms": usage.ttft_ns.map(ms),
        "total_time_ms": crate::clock::unix_millis().saturating_sub(received_ms),
        "kv_hit_rate": f64::from(usage.cached.total()) / f64::from(usage.prompt_tokens.max(1)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rootstock::hints;

    fn wish(nvext: Value) -> NvextWish {
        let parsed = hints::parse(&nvext, &json!({}), &[]);
        NvextWish::new(&parsed, 0, &[1, 2])
    }

    #[test]
    fn nothing_is_added_unless_asked_for() {
        let wish = wish(json!({"agent_hints": {"priority": "high"}}));
        assert_eq!(wish.of_text(&[1], 0), None);
        assert_eq!(
            wish.of_end(&Finish::Length, &[1], ChoiceUsage::default()),
            None
        );
    }

    #[test]
    fn what_was_asked_for_is_there_with_what_was_ignored() {
        let wish = wish(json!({
            "agent_hints": {"priority": "high"},
            "extra_fields": ["timing", "stop_reason", "prompt_token_ids", "completion_token_ids",
                "worker_id", "never_heard_of"],
        }));
        let end = wish.of_end(
            &Finish::StopString("x".into()),
            &[9],
            ChoiceUsage {
                replica: 2,
                ..ChoiceUsage::default()
            },
        );
        let end = end.unwrap();
        assert_eq!(end["stop_reason"], "x");
        assert_eq!(end["prompt_token_ids"], json!([1, 2]));
        assert_eq!(end["completion_token_ids"], json!([9]));
        assert_eq!(end["worker_id"]["decode_worker_id"], 2);
        let text = wish.of_text(&[9], 1).unwrap();
        assert_eq!(text["worker_id"]["decode_dp_rank"], 1);
        assert_eq!(end["timing"]["kv_hit_rate"], 0.0, "no division by zero");
        assert!(
            end["ignored_fields"][0]
                .as_str()
                .unwrap()
                .contains("priority")
        );
    }
}
