//! A step plan as plain arrays.

use rootstock::memory::PageId;
use rootstock::scheduler::{RowInput, StepPlan};

use crate::args::{self, Host};
use crate::handle::{self, Handle};
use crate::pages::{RootstockCopy, copy_of};
use crate::status::RootstockStatus;

/// A plan of a step, with all its arrays. Opaque; read it by rootstock_plan_view.
#[derive(Debug)]
pub struct Plan {
    step: u64,
    replica: u32,
    rows: Vec<RootstockRow>,
    tokens: Vec<u32>,
    page_tables: Vec<u32>,
    copies: Vec<RootstockCopy>,
    copy_pages: Vec<u32>,
    after: Vec<u64>,
}

/// One request's part of a step: it computes `length` positions from `first_position` on.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RootstockRow {
    /// The request.
    pub request: u64,
    /// Its namespace.
    pub namespace_id: u64,
    /// Index of its first input token in `tokens`; there are `length`.
    pub first_token: u32,
    /// Position of the first input token in the request.
    pub first_position: u32,
    /// Positions to compute.
    pub length: u32,
    /// Index of its block table in `page_tables`.
    pub first_page: u32,
    /// Pages of its block table: position p is on entry p / page_tokens, slot p % page_tokens.
    pub pages: u32,
    /// 1: the token after the last position is to be drawn.
    pub sample: u32,
    /// Index of the drawn token in the output.
    pub output_index: u32,
    /// Tokens that may be guessed and verified beyond the drawn one.
    pub drafts: u32,
    /// 0: the first input token is in `tokens`. Else it is the one that row `from_row` of this
    /// step drew.
    pub from_step: u64,
    /// See `from_step`.
    pub from_row: u32,
    /// Temperature; 0 is greedy.
    pub temperature: f32,
    /// Keep the smallest set of tokens of this probability; 1 is off.
    pub top_p: f32,
    /// Drop tokens less probable than this share of the best; 0 is off.
    pub min_p: f32,
    /// Keep so many tokens; 0 is off.
    pub top_k: u32,
    /// Seed of the draws; a draw is a function of it, of `output_index` and of the logits.
    pub seed: u64,
}

/// Where the arrays of a plan are. They live until rootstock_plan_free.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RootstockPlanView {
    /// Id, ascending from 1 in each replica.
    pub step: u64,
    /// Whose pages the tables name.
    pub replica: u32,
    /// Rows.
    pub rows: *const RootstockRow,
    /// How many; 0 when there are copies only.
    pub row_count: usize,
    /// Input tokens of all rows.
    pub tokens: *const u32,
    /// How many.
    pub token_count: usize,
    /// Block tables of all rows.
    pub page_tables: *const u32,
    /// How many entries.
    pub page_count: usize,
    /// Copies to begin before the step.
    pub copies: *const RootstockCopy,
    /// How many.
    pub copy_count: usize,
    /// Pages of all copies, one after the other: of each its sources, then its destinations.
    pub copy_pages: *const u32,
    /// Copies that must have ended before the step.
    pub after: *const u64,
    /// How many.
    pub after_count: usize,
}

impl Plan {
    pub(crate) fn new(plan: &StepPlan) -> Self {
        let ids = |pages: &[PageId]| pages.iter().map(|page| page.get()).collect::<Vec<u32>>();
        let mut copy_pages = Vec::new();
        for copy in &plan.copies {
            copy_pages.extend(ids(&copy.from.1));
            copy_pages.extend(ids(&copy.to.1));
        }
        Self {
            step: plan.id.0,
            replica: plan.replica.0.into(),
            rows: plan.rows.iter().map(row_of).collect(),
            tokens: plan.tokens.clone(),
            page_tables: ids(&plan.page_tables),
            copies: plan.copies.iter().map(copy_of).collect(),
            copy_pages,
            after: plan.after.iter().map(|copy| copy.0).collect(),
        }
    }
}

fn row_of(row: &rootstock::scheduler::Row) -> RootstockRow {
    let (from_step, from_row) = match row.input {
        RowInput::Known => (0, 0),
        RowInput::FromStep { step, row } => (step.0, row),
    };
    let params = row.sample.as_ref().map(|sample| &sample.params);
    RootstockRow {
        request: row.request.0,
        namespace_id: row.ns.get(),
        first_token: row.tokens.start,
        first_position: row.first_pos,
        length: row.len,
        first_page: row.pages.start,
        pages: row.pages.end - row.pages.start,
        sample: u32::from(row.sample.is_some()),
        output_index: row.sample.as_ref().map_or(0, |sample| sample.output_index),
        drafts: row.drafts.into(),
        from_step,
        from_row,
        temperature: params.map_or(0.0, |params| params.temperature),
        top_p: params.map_or(1.0, |params| params.top_p),
        min_p: params.map_or(0.0, |params| params.min_p),
        top_k: params.map_or(0, |params| params.top_k),
        seed: params.map_or(0, |params| params.seed),
    }
}

/// The arrays of a plan.
///
/// # Safety
/// `plan` is live, `view` has room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_plan_view(
    plan: *const Handle<Plan>,
    view: *mut RootstockPlanView,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, plan, |it| {
        args::check_out("view", view)?;
        let answer = RootstockPlanView {
            step: it.step,
            replica: it.replica,
            rows: it.rows.as_ptr(),
            row_count: it.rows.len(),
            tokens: it.tokens.as_ptr(),
            token_count: it.tokens.len(),
            page_tables: it.page_tables.as_ptr(),
            page_count: it.page_tables.len(),
            copies: it.copies.as_ptr(),
            copy_count: it.copies.len(),
            copy_pages: it.copy_pages.as_ptr(),
            after: it.after.as_ptr(),
            after_count: it.after.len(),
        };
        host.write("view", view, answer)
    })
}

/// Frees a plan. Null is nothing. The step itself stays out until it is completed or failed.
///
/// # Safety
/// `plan` came from rootstock_core_schedule and is never used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_plan_free(plan: *mut Handle<Plan>) {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::free(host, plan, |_| {});
}
