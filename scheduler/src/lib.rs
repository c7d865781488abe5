//! Which request computes which chunk in the next step.
//!
//! A [`Scheduler`] owns the requests of one replica, from [`Scheduler::add`] to their final
//! event. [`Scheduler::schedule`] returns a [`StepPlan`]: plain arrays that say which tokens are
//! computed onto which pages. A backend computes it, and [`Scheduler::complete`] takes the drawn
//! tokens: what was computed becomes matchable for every request at once.
//!
//! The crate is pure: no threads, no clock, no files, no randomness. Time is an argument, order
//! comes from data, and equal inputs give equal plans, page for page.
#![forbid(unsafe_code)]

mod admit;
mod batch;
mod check;
mod config;
mod draft;
mod emit;
mod fetch;
mod gate;
mod groups;
mod holding;
mod hurry;
mod idle_work;
mod live;
mod lookup;
mod move_over;
mod pins;
mod policy;
mod preempt;
mod programs;
mod queue;
mod rematch;
mod request;
pub mod router;
mod scheduler;
mod settle;
mod shutdown;
mod stats;
mod step;
mod time;
mod walk;
mod word_hash;

pub use config::{ConfigError, SchedulePolicy, SchedulerConfig};
pub use emit::{Admission, CachedTokens, Emit, FailKind, FinishReason, PinReport, Reason, Usage};
pub use move_over::Moving;
pub use request::{Class, NewRequest, RequestId, SamplingParams};
pub use scheduler::Scheduler;
pub use stats::SchedulerStats;
pub use step::{
    History, Logprobs, MaskId, Row, RowInput, RowOut, SampleSpec, StepOutput, StepPlan,
    TokenLogprob,
};
pub use time::{StepLoad, StepTime};
