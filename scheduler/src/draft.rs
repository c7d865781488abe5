//! A step in the making: rows drafted, guesses handed out, and the draft turned into a plan.
//!
//! A draft changes no request: rows can be withdrawn until it is committed. Committing moves the
//! marks of the requests and returns plain arrays.

use std::sync::Arc;

use rootstock_memory::{CopyPlan, StepId};

use crate::holding::pages_for;
use crate::live::{Live, count};
use crate::lookup::{USUAL_WORTH, WORTH_MAX};
use crate::request::RequestId;
use crate::scheduler::{Cx, Scheduler};
use crate::settle::{Flight, FlightRow};
use crate::step::{History, Row, RowInput, SampleSpec, StepPlan};
use crate::time::StepLoad;

/// A step in the making.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) budget: u32,
    /// Of that, what speculative prompts may take.
    pub(crate) idle_budget: u32,
    pub(crate) rows: Vec<DraftRow>,
    pub(crate) copies: Vec<CopyPlan>,
    /// Pages that running requests wait for, out of those that are coming.
    pub(crate) owed_pages: u32,
    /// It may run in the middle of the step in flight.
    pub(crate) overtakes: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftRow {
    pub(crate) id: RequestId,
    pub(crate) first_pos: u32,
    pub(crate) len: u32,
    pub(crate) drafts: u8,
    /// Whether the guesses are in the text of the request, from here on.
    pub(crate) guesses_at: Option<u32>,
    pub(crate) draws: bool,
    pub(crate) from: Option<(StepId, u32)>,
}

impl Draft {
    pub(crate) fn new(budget: u32, idle_budget: u32) -> Self {
        Self {
            budget,
            idle_budget,
            rows: Vec::new(),
            copies: Vec::new(),
            owed_pages: 0,
            overtakes: false,
        }
    }

    pub(crate) fn push(&mut self, row: DraftRow) {
        self.budget -= row.len + u32::from(row.drafts);
        self.rows.push(row);
    }

    /// What its rows compute and read, before any of them guesses.
    pub(crate) fn load(&self) -> StepLoad {
        let rows = self.rows.iter();
        StepLoad::of(rows.map(|row| (row.first_pos, row.len, row.draws)))
    }

    /// Takes a request's row back out.
    pub(crate) fn withdraw(&mut self, id: RequestId) {
        if let Some(at) = self.rows.iter().position(|row| row.id == id) {
            let row = self.rows.remove(at);
            self.budget += row.len + u32::from(row.drafts);
        }
    }
}

impl Scheduler {
    /// Lets rows that draw guess on with what nobody else needs of budget and pages.
    pub(crate) fn plan_guesses(&mut self, cx: &mut Cx<'_>, draft: &mut Draft) {
        if self.cfg.max_drafts == 0 {
            return;
        }
        let page_tokens = self.cfg.page_tokens;
        let worth = self.guess_worth(draft);
        for row in draft
            .rows
            .iter_mut()
            .filter(|row| row.draws && row.from.is_none())
        {
            let live = self
                .live
                .get_mut(&row.id)
                .expect("a drafted row is of a live request");
            if !live.can_draft(live.output_len()) {
                continue;
            }
            let made = live.output_len();
            let room = live.output_max - made - 1;
            let mut wanted = u32::from(self.cfg.max_drafts).min(room).min(draft.budget);
            if let Some(lookup) = &mut live.lookup {
                let guesses = lookup.guesses(&self.guessed, (&live.tokens, made), worth, wanted);
                wanted = count(guesses.len());
                row.guesses_at = Some(count(guesses.start));
            }
            let Some(run) = live.running_mut() else {
                continue;
            };
            let end = row.first_pos + row.len;
            let pages = pages_for(end + wanted, page_tokens);
            if let Ok(mut copies) = run.hold.take(cx.cache, pages, cx.now) {
                draft.copies.append(&mut copies);
            }
            let slots = count(run.hold.table().len()) * page_tokens - end;
            row.drafts = u8::try_from(wanted.min(slots)).unwrap_or(u8::MAX);
            if row.drafts == 0 {
                row.guesses_at = None;
            }
            draft.budget -= u32::from(row.drafts);
        }
    }

    /// What a right guess saves, a row of a later step, over what a guess costs in this one.
    fn guess_worth(&self, draft: &Draft) -> f64 {
        let decodes = draft.rows.iter().filter(|row| row.draws && row.len == 1);
        let rows = decodes.clone().count();
        let load = StepLoad::of(decodes.map(|row| (row.first_pos, 1, true)));
        let [_, token, draw, ..] = self.time.coefficients();
        match self.time.predict(load) {
            Some(ns) if rows > 0 => {
                let row = ns as f64 / rows as f64;
                (row / (token + draw).max(1.0)).min(WORTH_MAX)
            }
            _ => USUAL_WORTH,
        }
    }

    /// Turns a draft into a plan and its rows into rows in flight.
    pub(crate) fn commit(&mut self, cx: &mut Cx<'_>, draft: Draft) -> StepPlan {
        let step = self.step_id();
        let mut plan = StepPlan {
            id: step,
            replica: self.cfg.replica,
            rows: Vec::with_capacity(draft.rows.len()),
            tokens: Vec::new(),
            page_tables: Vec::new(),
            copies: draft.copies,
            after: Vec::new(),
            overtakes: draft.overtakes,
        };
        let mut rows = Vec::with_capacity(draft.rows.len());
        for (index, row) in draft.rows.iter().enumerate() {
            self.stats.guessed_tokens += row.guesses_at.map_or(0, |_| u64::from(row.drafts));
            let live = self
                .live
                .get_mut(&row.id)
                .expect("a drafted row is of a live request");
            append_row(&mut plan, live, row, self.cfg.page_tokens);
            let hold = live.holding().filter(|hold| hold.stands());
            let copy = hold.and_then(|hold| cx.cache.stand_on(hold.lease(), step));
            plan.after.extend(copy);
            let run = live
                .running_mut()
                .expect("a drafted row is of a running request");
            run.launched = row.first_pos + row.len;
            run.pending += u32::from(row.draws);
            run.drafting = row.drafts > 0;
            run.flight.push(step);
            run.last_row = Some((step, count(index)));
            live.work += u64::from(row.len);
            self.stats.computed_tokens += u64::from(row.len);
            let end = row.first_pos + row.len;
            rows.push(FlightRow {
                id: row.id,
                end,
                drafts: row.drafts,
                draws: row.draws,
            });
        }
        self.stats.steps += u64::from(!rows.is_empty());
        self.stats.copy_plans += u64::from(rows.is_empty());
        self.flights.push_back(Flight::new(&plan, rows, cx.now));
        plan
    }
}

fn append_row(plan: &mut StepPlan, live: &Live, row: &DraftRow, page_tokens: u32) {
    let run = live
        .running()
        .expect("a drafted row is of a running request");
    let first_token = count(plan.tokens.len());
    let input = match row.from {
        Some((step, index)) => {
            plan.tokens.push(0);
            RowInput::FromStep { step, row: index }
        }
        None => {
            let span = row.first_pos as usize..(row.first_pos + row.len) as usize;
            plan.tokens.extend_from_slice(&live.tokens[span]);
            RowInput::Known
        }
    };
    let end = count(plan.tokens.len());
    if let Some(at) = row.guesses_at {
        let guesses = &live.tokens[at as usize..][..usize::from(row.drafts)];
        plan.tokens.extend_from_slice(guesses);
    }
    let first_page = count(plan.page_tables.len());
    let covered = row.first_pos + row.len + u32::from(row.drafts);
    let pages = pages_for(covered, page_tokens);
    plan.page_tables
        .extend_from_slice(&run.hold.table()[..pages as usize]);
    plan.rows.push(Row {
        request: live.id,
        ns: live.ns,
        tokens: first_token..end,
        input,
        first_pos: row.first_pos,
        len: row.len,
        pages: first_page..count(plan.page_tables.len()),
        sample: row.draws.then(|| sample_spec(live, run.pending)),
        drafts: row.drafts,
        guesses: end..count(plan.tokens.len()),
        mask: None,
    });
}

fn sample_spec(live: &Live, pending: u32) -> SampleSpec {
    let output_index = live.output_len() + pending;
    let bound = output_index < live.suppress_until();
    SampleSpec {
        params: Arc::clone(&live.sampling),
        output_index,
        suppress: bound.then(|| Arc::clone(&live.stop_tokens)),
        history: live.sampling.has_penalties().then(|| History {
            tokens: live.tokens.clone(),
            prompt_tokens: live.prompt_tokens,
        }),
    }
}
