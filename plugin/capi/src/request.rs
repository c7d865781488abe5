//! A request of a host.

use std::ffi::c_char;

use rootstock::hints;
use rootstock::radix::{NamespaceId, TenantId};
use rootstock::scheduler::{Class, NewRequest, SamplingParams};
use serde_json::Value;

use crate::args::Host;
use crate::status::Failure;

/// A generation to ask for. Set everything to 0 first, then what is wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RootstockRequest {
    /// sizeof(RootstockRequest).
    pub struct_size: u32,
    /// Who pays.
    pub tenant: u32,
    /// From rootstock_core_namespace.
    pub namespace_id: u64,
    /// The prompt.
    pub tokens: *const u32,
    /// Tokens of the prompt.
    pub length: usize,
    /// Output tokens at most, 1 or more.
    pub max_tokens: u32,
    /// Output tokens before which no stop token ends the request.
    pub min_tokens: u32,
    /// Tokens that end the request.
    pub stop_tokens: *const u32,
    /// How many.
    pub stop_count: usize,
    /// 1: generate on through stop tokens.
    pub ignore_eos: u32,
    /// 1: warms the cache for a turn that may come, below every other request.
    pub speculative: u32,
    /// Temperature; 0 is greedy.
    pub temperature: f32,
    /// 0 (or 1) is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// Seed of the draws.
    pub seed: u64,
    /// What the agent knows: the JSON of `nvext` ({"agent_hints": {"priority": 5},
    /// "cache_control": {"type": "ephemeral", "ttl": "5m"}}), or null. What is not understood is
    /// ignored, never an error.
    pub nvext: *const c_char,
    /// Bytes of `nvext`.
    pub nvext_length: usize,
    /// Instant at which it ends as expired, 0 for none.
    pub deadline_ns: u64,
    /// The host's own handle; echoed in every event.
    pub label: u64,
}

/// Reads a request.
pub(crate) fn read(host: Host, request: *const RootstockRequest) -> Result<NewRequest, Failure> {
    let it = host.sized("request", request)?;
    let nvext = host.text("nvext", it.nvext, it.nvext_length)?;
    let nvext: Value = match nvext {
        "" => Value::Null,
        text => serde_json::from_str(text)
            .map_err(|error| Failure::invalid(format!("nvext is not JSON: {error}")))?,
    };
    Ok(NewRequest {
        tenant: TenantId(it.tenant),
        ns: NamespaceId::from_raw(it.namespace_id),
        tokens: host.slice("tokens", it.tokens, it.length)?.to_vec(),
        max_tokens: it.max_tokens,
        min_tokens: it.min_tokens,
        stop_tokens: host
            .slice("stop_tokens", it.stop_tokens, it.stop_count)?
            .to_vec(),
        ignore_eos: it.ignore_eos != 0,
        sampling: SamplingParams {
            temperature: it.temperature,
            top_k: it.top_k,
            top_p: if it.top_p == 0.0 { 1.0 } else { it.top_p },
            min_p: it.min_p,
            seed: it.seed,
            ..SamplingParams::greedy()
        },
        hints: hints::parse(&nvext, &Value::Null, &[]).hints,
        class: if it.speculative == 0 {
            Class::Client
        } else {
            Class::Speculative
        },
        deadline: (it.deadline_ns > 0).then_some(it.deadline_ns),
        label: it.label,
    })
}
