//! The HTTP server over the engine: configuration, OpenAI's routes, limits, metrics, drain.
//!
//! A library, so that tests start it in-process on port 0 and embedders may mount its router; the
//! binary `rootstock` adds the command line and the signals. One request's way: `http::listener`
//! accepts, `app` routes, `openai::routes` reads and checks everything, `engine_port` makes
//! tokens and submits, `openai::generation` turns events into parts, `openai::stream` or one JSON
//! answer sends them.
#![forbid(unsafe_code)]

pub mod about;
pub mod app;
pub mod bench;
#[cfg(feature = "cuda")]
pub mod bench_kernels;
mod chart;
pub mod chat_client;
pub mod cli;
mod clock;
pub mod config;
mod engine_metrics;
pub mod engine_port;
pub mod exact_replay;
pub mod free_memory;
pub mod kind_retention;
pub mod load;
pub mod metrics;
pub mod options;
pub mod page;
mod progress;
pub mod remote;
pub mod replay;
pub mod request_trace;
mod router_options;
pub mod serve;
pub mod spans;
#[cfg(feature = "top")]
pub mod top;

/// The HTTP side that knows nothing of models.
pub mod http {
    pub mod admin;
    pub mod answer;
    pub mod api_error;
    pub mod body;
    pub mod keys;
    pub mod label;
    pub mod lifecycle;
    pub mod linger;
    pub mod listener;
    pub mod rate;
    pub mod sse;
    pub mod stall_guard;
}

/// Anthropic's API.
pub mod anthropic {
    pub mod cache;
    pub mod content;
    pub mod reply;
    pub mod request;
    pub mod routes;
    pub mod stream;
}

/// What the chat APIs share.
pub mod chat {
    pub mod ahead;
    pub mod conversation;
    pub mod derived;
    pub mod message;
    pub mod stream;
    pub mod tools;
    pub mod work;
}

/// OpenAI's Responses.
pub mod responses {
    pub mod input;
    pub mod reply;
    pub mod request;
    pub mod routes;
    pub mod store;
    pub mod stream;
}

/// Tool calls and thoughts as models write them.
pub mod tools {
    pub mod call;
    pub mod prompt;
    pub mod speech;
    pub mod style;
}

/// Routes that look into the cache and steer it.
pub mod control {
    pub mod access;
    pub mod actions;
    pub mod departures;
    pub mod envelope;
    pub mod flush;
    pub mod in_request;
    pub mod memory;
    pub mod picture;
    pub mod programs;
    pub mod query;
    pub mod sessions;
    pub mod stats;
    pub mod storage;
    pub mod tree;
    pub mod why;
}

/// KV events over ZeroMQ, for routers that want to know what is cached here.
pub mod kv_events {
    pub mod endpoint;
    pub mod publisher;
    pub mod ring;
    mod sockets;
    /// What `ring.rs` is made of; `tests/schedules` has another.
    mod sync {
        pub(super) use std::sync::{Mutex, MutexGuard};
    }
    mod wire;
    mod zmtp;
}

/// OpenAI's API.
pub mod openai {
    pub mod ask;
    pub mod ends;
    pub mod fields;
    pub mod generation;
    pub mod logprobs;
    pub mod messages;
    pub mod reply;
    pub mod reply_nvext;
    pub mod routes;
    pub mod stream;
    pub mod tokens;
    pub mod turn;
}

/// The code of the README, so that it compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;
