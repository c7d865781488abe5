//! The rest of `nvext`: fields by which a caller asks for another way to generate, or for certain
//! workers. Carried to whoever can act on them.

use rootstock_radix::Token;

use super::fields::{Fields, Notes, printable};
use super::session::Headers;
use super::{LIST_MAX, header_int};

/// `nvext` fields that change the prompt or the sampling by the caller's explicit wish.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Generation {
    /// `greed_sampling`.
    pub greedy: bool,
    /// `use_raw_prompt`: skip the chat template.
    pub raw_prompt: bool,
    /// `token_data`: the tokenized prompt.
    pub token_data: Option<Vec<Token>>,
    /// `max_thinking_tokens`.
    pub max_thinking_tokens: Option<u32>,
}

/// `nvext` fields that choose workers; without meaning for a single server, carried for a router.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routing {
    /// Worker for the whole request.
    pub backend_instance_id: Option<u64>,
    /// Worker for the prefill.
    pub prefill_worker_id: Option<u64>,
    /// Worker for the decode.
    pub decode_worker_id: Option<u64>,
    /// Data-parallel rank.
    pub dp_rank: Option<u32>,
    /// Data-parallel rank of the prefill; `u32::MAX` counts as absent.
    pub prefill_dp_rank: Option<u32>,
    /// Taints a worker must have.
    pub required_taints: Vec<String>,
    /// Taints that scale a worker's cost.
    pub preferred_taints: Vec<(String, f64)>,
    /// Target for the first token, in milliseconds.
    pub ttft_target_ms: Option<f64>,
    /// Target between tokens, in milliseconds.
    pub itl_target_ms: Option<f64>,
}

pub(super) fn generation_of(body: &Fields<'_>, notes: &mut Notes) -> Generation {
    let token_data = body.get("token_data").and_then(|value| {
        let tokens: Option<Vec<Token>> = value.as_array().and_then(|items| {
            items
                .iter()
                .map(|item| Token::try_from(item.as_u64()?).ok())
                .collect()
        });
        if tokens.is_none() {
            body.expected("token_data", "a list of token ids", value, notes);
        }
        tokens
    });
    Generation {
        greedy: body.boolean("greed_sampling", notes).unwrap_or(false),
        raw_prompt: body.boolean("use_raw_prompt", notes).unwrap_or(false),
        token_data,
        max_thinking_tokens: body.int("max_thinking_tokens", notes),
    }
}

pub(super) fn routing_of(body: &Fields<'_>, headers: Headers<'_>, notes: &mut Notes) -> Routing {
    let worker: Option<u64> = header_int(
        headers,
        &["x-dynamo-worker-instance-id", "x-worker-instance-id"],
        notes,
    );
    let prefill = header_int(
        headers,
        &["x-dynamo-prefill-instance-id", "x-prefill-instance-id"],
        notes,
    );
    let rank = header_int(
        headers,
        &["x-dynamo-dp-rank", "x-dp-rank", "x-data-parallel-rank"],
        notes,
    );
    let prefill_rank = header_int(
        headers,
        &["x-dynamo-prefill-dp-rank", "x-prefill-dp-rank"],
        notes,
    );
    let constraints = Fields::of(
        body.get("routing_constraints"),
        "routing_constraints",
        notes,
    );
    constraints.note_unknown(&["required_taints", "preferred_taints"], notes);
    let targets = Fields::of(body.get("router"), "router", notes);
    targets.note_unknown(&["ttft_target", "itl_target"], notes);
    Routing {
        backend_instance_id: worker.or_else(|| body.int("backend_instance_id", notes)),
        prefill_worker_id: prefill.or_else(|| body.int("prefill_worker_id", notes)),
        decode_worker_id: worker.or_else(|| body.int("decode_worker_id", notes)),
        dp_rank: rank.or_else(|| body.int("dp_rank", notes)),
        prefill_dp_rank: prefill_rank
            .or_else(|| body.int("prefill_dp_rank", notes))
            .filter(|rank| *rank != u32::MAX),
        required_taints: constraints.texts("required_taints", LIST_MAX, notes),
        preferred_taints: preferred_taints(&constraints, notes),
        ttft_target_ms: targets.number("ttft_target", notes),
        itl_target_ms: targets.number("itl_target", notes),
    }
}

fn preferred_taints(constraints: &Fields<'_>, notes: &mut Notes) -> Vec<(String, f64)> {
    const PATH: &str = "routing_constraints.preferred_taints";
    let Some(value) = constraints.get("preferred_taints") else {
        return Vec::new();
    };
    let Some(map) = value.as_object() else {
        notes.expected(PATH, "an object", value);
        return Vec::new();
    };
    let mut taints = Vec::new();
    for (name, weight) in map.iter().take(LIST_MAX) {
        match weight.as_f64().filter(|weight| weight.is_finite()) {
            Some(weight) => taints.push((printable(name, 256), weight)),
            None => notes.expected(PATH, "finite numbers", weight),
        }
    }
    if map.len() > LIST_MAX {
        notes.add(PATH, &format!("more than {LIST_MAX} items"));
    }
    taints
}
