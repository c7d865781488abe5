//! Bodies of requests through the whole server but its sockets: routes, readers, templates,
//! grammars, down to the request that the core gets and back to the answer. The backend says the
//! first thing that is allowed. Nothing may be the server's fault, and everything ends.
//!
//! The first byte names the route. A second one below 128 means that the rest is the body; else the
//! rest are changes of a body that a released client has sent.
//!
//! `cargo +nightly fuzz run http_body -- -dict=dictionaries/http_body -max_total_time=60`, in
//! `tests/fuzz`.
#![no_main]

#[expect(dead_code, reason = "shared with the HTTP tests, which use all of it")]
#[path = "../../tests/http/tiny_model.rs"]
mod tiny_model;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use libfuzzer_sys::fuzz_target;
use rootstock::memory::{
    CopyDone, CopyEngine, CopyPlan, Full, KvDtype, KvLayout, LayoutOrder, LayoutSpec, StepId,
};
use rootstock::scheduler::{RowOut, StepOutput, StepPlan};
use rootstock::{Backend, Caps, Masks, StepError};
use rootstock_engine::gguf::Gguf;
use rootstock_engine::service::{ModelIdentity, Service, ServiceConfig};
use rootstock_server::app::App;
use rootstock_server::config::HttpLimits;
use rootstock_server::engine_port::Engine;
use serde_json::{Map, Value, json};
use tiny_model::{CONTEXT, IM_END, TinyModel, VOCAB};
use tower::ServiceExt;

const PATHS: [&str; 8] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/kv/actions",
];
const BODIES: &str = include_str!("../../data/captured_bodies.jsonl");
const PAGES: u32 = 1024;
/// Far beyond anything that a body can keep the server busy with.
const PATIENCE: Duration = Duration::from_secs(30);
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Says the end, or the lowest token that is allowed instead.
struct Mute {
    layout: KvLayout,
    done: BTreeMap<u64, StepOutput>,
    masks: Option<Arc<dyn Masks>>,
}

impl Mute {
    fn token(&self, mask: Option<&[u32]>) -> u32 {
        let allows =
            |token: u32| mask.is_none_or(|mask| mask[token as usize / 32] >> (token % 32) & 1 == 1);
        let closing = [IM_END, u32::from(b'"'), u32::from(b'}'), u32::from(b']')];
        let mut all = closing.into_iter().chain(0..VOCAB);
        all.find(|token| allows(*token)).unwrap_or(IM_END)
    }
}

impl Backend for Mute {
    fn caps(&self) -> Caps {
        Caps {
            layout: self.layout,
            numerics_id: "mute".into(),
            max_in_flight: 1,
            vocab: VOCAB,
        }
    }

    fn launch(&mut self, plan: StepPlan) -> Result<(), StepError> {
        let rows = plan.rows.iter().map(|row| {
            let Some(sample) = &row.sample else {
                return RowOut::default();
            };
            let masks = self.masks.as_deref();
            let mask = masks.and_then(|masks| masks.allowed(row.request, sample.output_index));
            let token = self.token(mask.as_deref());
            if let Some(masks) = masks {
                masks.drawn(row.request, sample.output_index, token);
            }
            RowOut {
                accepted: [token].into_iter().collect(),
                logprobs: None,
            }
        });
        let output = StepOutput {
            rows: rows.collect(),
        };
        self.done.insert(plan.id.0, output);
        Ok(())
    }

    fn wait(&mut self, step: StepId) -> Result<StepOutput, StepError> {
        self.done
            .remove(&step.0)
            .ok_or(StepError::NotInFlight { step })
    }

    fn copies(&mut self) -> &mut dyn CopyEngine {
        self
    }

    fn use_masks(&mut self, masks: Arc<dyn Masks>) -> bool {
        self.masks = Some(masks);
        true
    }
}

impl CopyEngine for Mute {
    fn submit(&mut self, plan: CopyPlan) -> Result<(), (CopyPlan, Full)> {
        panic!("one tier has no copies: {plan:?}")
    }

    fn poll(&mut self, _: &mut Vec<CopyDone>) {}
}

struct World {
    runtime: tokio::runtime::Runtime,
    app: Arc<App>,
    bodies: Vec<Value>,
}

fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| {
        let model = TinyModel::without_weights();
        let file = Gguf::open(&model.path).expect("a model");
        let layout = KvLayout::new(LayoutSpec {
            order: LayoutOrder::PageFirst,
            page_tokens: 16,
            layers: 1,
            kv_heads: 1,
            head_dim: 16,
            dtype: KvDtype::F32,
        });
        let backend = Mute {
            layout: layout.expect("a layout"),
            done: BTreeMap::new(),
            masks: None,
        };
        let config = ServiceConfig {
            page_size: 16,
            device_pages: Some(PAGES),
            ..ServiceConfig::default()
        };
        let identity = ModelIdentity {
            name: "mute".into(),
            revision: "1".into(),
            context: CONTEXT,
            weight_bytes: 0,
        };
        let service = Service::start_with(config, vec![Box::new(backend)], identity);
        let service = service.expect("a service");
        let engine = Engine::new(service, &file).expect("an engine");
        let limits = HttpLimits::default();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let body = |line: &str| serde_json::from_str::<Value>(line).expect("JSON")["body"].clone();
        World {
            runtime: runtime.expect("a runtime"),
            app: App::new(engine, limits),
            bodies: BODIES.lines().map(body).collect(),
        }
    })
}

/// Bytes that decide about changes; 0 when they are used up.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn roll(&mut self, sides: usize) -> usize {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        usize::from(*first) % sides.max(1)
    }

    fn text(&mut self) -> String {
        let length = self.roll(24).min(self.0.len());
        let (text, rest) = self.0.split_at(length);
        self.0 = rest;
        String::from_utf8_lossy(text).into_owned()
    }

    fn value(&mut self) -> Value {
        match self.roll(14) {
            0 => Value::Null,
            1 => true.into(),
            2 => json!(-1),
            3 => self.roll(256).into(),
            4 => json!(1e308),
            5 => u64::MAX.into(),
            6 => json!(0.5),
            7 => json!([self.text()]),
            8 => json!({"type": self.text(), "content": [{}]}),
            9 => json!({self.text(): self.text()}),
            10 => json!([]),
            11 => "x".repeat(2000).into(),
            _ => self.text().into(),
        }
    }

    fn change(&mut self, value: &mut Value) {
        let goes_on = self.roll(4) > 0;
        match value {
            Value::Object(fields) if goes_on && !fields.is_empty() => {
                let at = self.roll(fields.len());
                self.change_field(fields, at);
            }
            Value::Array(list) if goes_on && !list.is_empty() => {
                let at = self.roll(list.len());
                match self.roll(8) {
                    0 => drop(list.remove(at)),
                    1 => list.push(list[at].clone()),
                    2 => list.reverse(),
                    _ => self.change(&mut list[at]),
                }
            }
            _ => *value = self.value(),
        }
    }

    fn change_field(&mut self, fields: &mut Map<String, Value>, at: usize) {
        let Some(key) = fields.keys().nth(at).cloned() else {
            return;
        };
        match self.roll(8) {
            0 => drop(fields.remove(&key)),
            1 => {
                let (key, value) = (self.text(), self.value());
                fields.insert(key, value);
            }
            _ => self.change(&mut fields[&key]),
        }
    }
}

fn body(world: &World, data: &[u8]) -> Vec<u8> {
    let Some((kind, rest)) = data.split_first() else {
        return Vec::new();
    };
    if *kind < 128 {
        return rest.to_vec();
    }
    let mut choices = Choices(rest);
    let mut body = world.bodies[usize::from(*kind) % world.bodies.len()].clone();
    for _ in 0..=choices.roll(4) {
        choices.change(&mut body);
    }
    body.to_string().into_bytes()
}

async fn ask(world: &World, path: &str, body: Vec<u8>) -> (u16, Bytes) {
    let request = Request::post(path)
        .body(Body::from(body))
        .expect("a request");
    let Ok(answer) = world.app.router().oneshot(request).await;
    let status = answer.status().as_u16();
    let bytes = axum::body::to_bytes(answer.into_body(), ANSWER_BYTES_MAX).await;
    (status, bytes.expect("an answer of a sane length"))
}

fuzz_target!(|data: &[u8]| {
    let Some((route, rest)) = data.split_first() else {
        return;
    };
    let world = world();
    let path = PATHS[usize::from(*route) % PATHS.len()];
    let body = body(world, rest);
    let shown = String::from_utf8_lossy(&body).into_owned();
    let asked = async { tokio::time::timeout(PATIENCE, ask(world, path, body)).await };
    let Ok((status, answer)) = world.runtime.block_on(asked) else {
        panic!("{path} never ended: {shown}");
    };
    assert!(status < 500, "{path}: {status} for {shown}");
    let text = String::from_utf8(answer.to_vec()).expect("answers are text");
    assert!(
        !text.contains("\"server_error\""),
        "{path}: {text} for {shown}"
    );
    if status >= 400 {
        let error: Value = serde_json::from_str(&text).expect("errors are JSON");
        assert!(error["error"]["message"].is_string(), "{path}: {text}");
    }
    assert!(world.app.engine.alive(), "the engine is gone after {shown}");
});
