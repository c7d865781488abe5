//! An engine double: runs plans on fingerprints instead of KV, and believes nothing.
//!
//! It keeps one fingerprint per slot of every tier. A row reads every slot of its page table and
//! compares it with the fingerprint of the request's true history, then writes its own. Steps
//! run as late as they may, when their result is asked for; copies finish some polls late, and
//! some fail. What fails leaves garbage behind. Rows may guess drafts, right and wrong.
//!
//! Faults can be planted to show that the simulation finds them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rootstock_memory::{
    CopyDone, CopyEngine, CopyId, CopyPlan, Full, PageId, ReplicaId, StepId, TierId,
};
use rootstock_radix::{NamespaceId, Token};
use rootstock_scheduler::{RequestId, Row, RowInput, RowOut, SampleSpec, StepOutput, StepPlan};

use crate::planted::Planted;
use crate::rng::Rng;
use crate::text;

const GARBAGE: u64 = 0xdead_dead_dead_dead;
/// Copies that may be under way at a time.
const COPIES_MAX: usize = 64;

/// What the double knows of a request: the truth its pages are compared with.
#[derive(Clone, Debug)]
struct Truth {
    ns: NamespaceId,
    prompt_tokens: u32,
    tokens: Vec<Token>,
    /// Fingerprint of each position.
    kv: Vec<u64>,
}

impl Truth {
    fn push(&mut self, token: Token) {
        let before = self
            .kv
            .last()
            .copied()
            .unwrap_or_else(|| text::empty(self.ns));
        self.tokens.push(token);
        self.kv.push(text::extend(before, token));
    }
}

#[derive(Debug)]
struct Copy {
    plan: CopyPlan,
    polls_left: u32,
    fails: bool,
    /// Acknowledged already: a planted fault.
    early: bool,
}

/// The double of all replicas' backends and copy engines, which share the host tier.
#[derive(Debug)]
pub struct EngineDouble {
    page_tokens: u32,
    memory: BTreeMap<TierId, Vec<u64>>,
    truths: BTreeMap<RequestId, Truth>,
    launched: BTreeMap<ReplicaId, VecDeque<StepPlan>>,
    /// First drawn token of each row of the last steps, for rows that follow them.
    drawn: BTreeMap<(ReplicaId, StepId), Vec<Option<Token>>>,
    copies: Vec<Copy>,
    finished_copies: BTreeSet<CopyId>,
    copy_delay_max: u32,
    /// Chance that a copy fails, in percent.
    pub copy_failures: u32,
    /// Whether a step that overtakes runs before the one it overtakes.
    pub pauses: bool,
    /// Whether it adds the token that a row continues from to the row's history.
    pub completes_histories: bool,
    /// Whether it orders the layers of a step behind the copies that the plan names.
    pub orders_layers: bool,
    /// Copies that failed, for steps that stand on them.
    failed_copies: BTreeSet<CopyId>,
    /// While set, no copy ends.
    pub hold_copies: bool,
    rng: Rng,
    planted: Planted,
    rows_seen: u32,
    /// First thing found wrong.
    pub finding: Option<String>,
    /// Rows run.
    pub rows_run: u64,
    /// Rows that took their input from a step in flight.
    pub rows_ahead: u64,
    /// Rows that accepted more than one token.
    pub rows_many: u64,
    /// Copies acknowledged as done, by direction: down, up.
    pub copies_done: [u64; 2],
    /// Copies acknowledged as failed.
    pub copies_failed: u64,
    /// Copies under way that a step stood on when it ran.
    pub steps_in_transit: u64,
}

impl EngineDouble {
    /// A double with no bytes yet. Its own choices (guesses, delays) come from `seed`.
    pub fn new(page_tokens: u32, copy_delay_max: u32, seed: u64, planted: Planted) -> Self {
        Self {
            page_tokens,
            memory: BTreeMap::new(),
            truths: BTreeMap::new(),
            launched: BTreeMap::new(),
            drawn: BTreeMap::new(),
            copies: Vec::new(),
            finished_copies: BTreeSet::new(),
            copy_delay_max,
            copy_failures: 0,
            pauses: true,
            completes_histories: false,
            orders_layers: false,
            failed_copies: BTreeSet::new(),
            hold_copies: false,
            rng: Rng::new(seed),
            planted,
            rows_seen: 0,
            finding: None,
            rows_run: 0,
            rows_ahead: 0,
            rows_many: 0,
            copies_done: [0; 2],
            copies_failed: 0,
            steps_in_transit: 0,
        }
    }

    /// Tells the truth about a request: its namespace and prompt.
    pub fn know(&mut self, id: RequestId, ns: NamespaceId, prompt: &[Token]) {
        let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let mut truth = Truth {
            ns,
            prompt_tokens,
            tokens: Vec::new(),
            kv: Vec::new(),
        };
        prompt.iter().for_each(|&token| truth.push(token));
        self.truths.insert(id, truth);
    }

    /// Takes a plan, and looks for pages that one step in flight writes and another names for
    /// somebody else: steps may overlap on real devices.
    ///
    /// # Panics
    /// With more copies under way than it takes.
    pub fn launch(&mut self, plan: StepPlan) {
        let flying = self.launched.entry(plan.replica).or_default();
        let mut findings = Vec::new();
        for other in flying.iter().chain([&plan]) {
            let found = foreign_write(other, &plan, self.page_tokens)
                .or_else(|| foreign_write(&plan, other, self.page_tokens));
            findings.extend(found);
        }
        let home = TierId::Device(plan.replica);
        for copy in &plan.copies {
            if copy.from.0 != home && copy.to.0 != home {
                findings.push(format!("copy {} is not of {home:?}", copy.id.0));
            }
            let submitted = self.submit(copy.clone());
            assert!(
                submitted.is_ok(),
                "the scheduler of a simulation stays below the copy limit"
            );
        }
        if let Some(found) = findings.into_iter().next() {
            self.finding.get_or_insert(found);
        }
        self.launched
            .entry(plan.replica)
            .or_default()
            .push_back(plan);
    }

    /// Steps that are out.
    pub fn in_flight(&self) -> usize {
        self.launched.values().map(VecDeque::len).sum()
    }

    /// Steps of one replica that are out.
    pub fn in_flight_of(&self, replica: ReplicaId) -> usize {
        self.launched.get(&replica).map_or(0, VecDeque::len)
    }

    /// Place of the step whose result comes next: the oldest, or one that overtakes it.
    fn next_at(&self, replica: ReplicaId) -> usize {
        let flying = self.launched.get(&replica);
        let overtaking = flying.and_then(|plans| plans.iter().position(|plan| plan.overtakes));
        overtaking.filter(|_| self.pauses).unwrap_or(0)
    }

    fn take_next(&mut self, replica: ReplicaId) -> Option<StepPlan> {
        let at = self.next_at(replica);
        self.launched.get_mut(&replica)?.remove(at)
    }

    /// Requests with a row in the oldest step of a replica.
    pub fn oldest_rows(&self, replica: ReplicaId) -> Vec<RequestId> {
        let flying = self.launched.get(&replica);
        let next = flying.and_then(|plans| plans.get(self.next_at(replica)));
        next.map_or_else(Vec::new, |plan| {
            plan.rows.iter().map(|row| row.request).collect()
        })
    }

    /// Whether the oldest step of a replica stands on a copy that fails or has failed.
    pub fn must_fail(&self, replica: ReplicaId) -> bool {
        let flying = self.launched.get(&replica);
        let next = flying.and_then(|plans| plans.get(self.next_at(replica)));
        let bad = |id: &CopyId| {
            let fails = self
                .copies
                .iter()
                .any(|copy| copy.plan.id == *id && copy.fails);
            fails || self.failed_copies.contains(id)
        };
        next.is_some_and(|plan| plan.after.iter().any(bad))
    }

    /// The bytes of a copy that a step stands on are there when its layers are computed, whenever
    /// the copy is acknowledged.
    fn bring(&mut self, id: CopyId) -> bool {
        let under_way = self.copies.iter().find(|copy| copy.plan.id == id);
        let Some(plan) = under_way.map(|copy| copy.plan.clone()) else {
            return false;
        };
        self.move_bytes(&plan, false);
        self.steps_in_transit += 1;
        true
    }

    /// Copies that are not acknowledged.
    pub fn copies_under_way(&self) -> usize {
        self.copies.len()
    }

    /// The oldest step of the first replica fails.
    pub fn fail_oldest(&mut self) -> Option<StepId> {
        self.fail_oldest_of(ReplicaId(0))
    }

    /// The oldest step of a replica fails after it has written part of its rows.
    pub fn fail_oldest_of(&mut self, replica: ReplicaId) -> Option<StepId> {
        let plan = self.take_next(replica)?;
        for row in &plan.rows {
            if self.rng.percent(50) {
                let at = self.slot(plan.row_pages(row), row.first_pos);
                self.write(plan.replica, at, GARBAGE);
            }
            // Its later steps run on garbage, and nobody may believe them.
            self.truths.remove(&row.request);
        }
        self.remember(&plan, vec![None; plan.rows.len()]);
        Some(plan.id)
    }

    /// Runs the oldest step of the first replica.
    pub fn run_oldest(&mut self) -> Option<(StepId, StepOutput)> {
        self.run_oldest_of(ReplicaId(0))
    }

    /// Runs the oldest step of a replica.
    pub fn run_oldest_of(&mut self, replica: ReplicaId) -> Option<(StepId, StepOutput)> {
        let plan = self.take_next(replica)?;
        let mut late = Vec::new();
        for &id in &plan.after {
            let there = self.finished_copies.contains(&id);
            if !(there || self.orders_layers && self.bring(id)) {
                late.push(id);
            }
        }
        if let Some(id) = late.first() {
            self.finding
                .get_or_insert(format!("step {} ran before copy {}", plan.id.0, id.0));
        }
        let mut output = StepOutput::default();
        let mut drawn = Vec::new();
        for row in &plan.rows {
            let out = self.run_row(&plan, row);
            drawn.push(out.accepted.first().copied());
            output.rows.push(out);
        }
        self.remember(&plan, drawn);
        Some((plan.id, output))
    }

    /// Keeps what a step drew, for the few steps after it.
    fn remember(&mut self, plan: &StepPlan, drawn: Vec<Option<Token>>) {
        self.drawn.insert((plan.replica, plan.id), drawn);
        let old = StepId(plan.id.0.saturating_sub(8));
        self.drawn
            .retain(|&(replica, step), _| replica != plan.replica || step > old);
    }

    /// A request has ended and its steps have landed: it is forgotten.
    pub fn forget(&mut self, id: RequestId) {
        self.truths.remove(&id);
    }

    fn run_row(&mut self, plan: &StepPlan, row: &Row) -> RowOut {
        self.rows_run += 1;
        let mut table = plan.row_pages(row).to_vec();
        self.plant_in_table(plan, row, &mut table);
        let mut tokens = plan.row_tokens(row).to_vec();
        if let RowInput::FromStep { step, row: index } = row.input {
            self.rows_ahead += 1;
            let source = self
                .drawn
                .get(&(plan.replica, step))
                .and_then(|rows| rows.get(index as usize));
            match source.copied().flatten() {
                Some(token) => tokens[0] = token,
                // The step before failed, or the row is of a request that has ended.
                None => return self.nonsense(row),
            }
        }
        let Some(mut kv) = self.read_history(plan, row, &table) else {
            return self.nonsense(row);
        };
        let mut at = row.first_pos;
        let lost = self.hit(|p| matches!(p, Planted::LostWrite(_)));
        for (index, token) in tokens.iter().enumerate() {
            kv = text::extend(kv, *token);
            if !(lost && index + 1 == tokens.len()) {
                let slot = self.slot(&table, at);
                self.write(plan.replica, slot, kv);
            }
            at += 1;
        }
        let mut out = RowOut::default();
        let Some(spec) = &row.sample else { return out };
        self.compare_spec(row, spec, tokens[0]);
        let suppress = spec.suppress.as_deref().unwrap_or(&[]);
        let mut token = text::draw(kv, &spec.params, spec.output_index, suppress);
        out.accepted.push(token);
        for index in 1..=u32::from(row.drafts) {
            let given = plan.row_guesses(row).get(index as usize - 1).copied();
            let guess = given.unwrap_or_else(|| {
                if self.rng.percent(70) {
                    token
                } else {
                    token + 1
                }
            });
            let slot = self.slot(&table, at);
            self.write(plan.replica, slot, text::extend(kv, guess));
            if guess != token {
                break;
            }
            kv = text::extend(kv, token);
            at += 1;
            token = text::draw(kv, &spec.params, spec.output_index + index, suppress);
            out.accepted.push(token);
        }
        self.rows_many += u64::from(out.accepted.len() > 1);
        if self.hit(|p| matches!(p, Planted::WrongCount(_))) {
            out.accepted.pop();
            out.accepted.push(token ^ 1);
        }
        self.tell_truth(row, &out);
        out
    }

    /// The index and the history of a draw are those of the true request, whatever happened to
    /// it in between.
    fn compare_spec(&mut self, row: &Row, spec: &SampleSpec, first: Token) {
        let Some(truth) = self.truths.get(&row.request) else {
            return;
        };
        let end = row.first_pos + row.len;
        let index = end.checked_sub(truth.prompt_tokens);
        let adds = self.completes_histories && row.input != RowInput::Known;
        let same_past = spec.history.as_ref().is_none_or(|history| {
            let known = history.tokens.iter().chain(adds.then_some(&first));
            history.prompt_tokens == truth.prompt_tokens
                && truth.tokens.get(..end as usize) == Some(&*known.copied().collect::<Vec<_>>())
        });
        if index != Some(spec.output_index) || !same_past {
            let given = spec.output_index;
            self.finding.get_or_insert(format!(
                "request {} draws output {given} at position {end}, with the right past: \
                 {same_past}",
                row.request.0
            ));
        }
    }

    /// The double keeps the request's history itself, from what it drew.
    fn tell_truth(&mut self, row: &Row, out: &RowOut) {
        let Some(truth) = self.truths.get_mut(&row.request) else {
            return;
        };
        let known = (row.first_pos + row.len) as usize;
        if truth.tokens.len() == known {
            out.accepted.iter().for_each(|&token| truth.push(token));
        }
    }

    /// Reads and compares every slot before the row; the last fingerprint read is what the row
    /// goes on from, right or wrong.
    fn read_history(&mut self, plan: &StepPlan, row: &Row, table: &[PageId]) -> Option<u64> {
        let truth = self.truths.get(&row.request)?;
        let memory = self.memory.get(&TierId::Device(plan.replica));
        let mut last = text::empty(row.ns);
        for at in 0..row.first_pos {
            let slot = self.slot(table, at);
            last = memory.and_then(|m| m.get(slot).copied()).unwrap_or(0);
            let right = truth.kv.get(at as usize).copied();
            if Some(last) != right {
                self.finding.get_or_insert(format!(
                    "step {}, request {}: position {at} on page {} holds {last:x}, not {right:x?}",
                    plan.id.0,
                    row.request.0,
                    table[(at / self.page_tokens) as usize].get(),
                ));
                break;
            }
        }
        Some(last)
    }

    /// Whatever a row gives whose request is gone; the scheduler must not use it.
    fn nonsense(&self, row: &Row) -> RowOut {
        let mut out = RowOut::default();
        if row.sample.is_some() {
            out.accepted.push(text::VOCAB + 1);
        }
        out
    }

    fn slot(&self, table: &[PageId], at: u32) -> usize {
        let page = table[(at / self.page_tokens) as usize].index();
        page * self.page_tokens as usize + (at % self.page_tokens) as usize
    }

    fn write(&mut self, replica: ReplicaId, slot: usize, kv: u64) {
        let memory = self.memory.entry(TierId::Device(replica)).or_default();
        if memory.len() <= slot {
            memory.resize(slot + 1, 0);
        }
        memory[slot] = kv;
    }

    /// Counts an occasion for the planted fault; true when its time has come.
    fn hit(&mut self, kind: impl Fn(Planted) -> bool) -> bool {
        if !kind(self.planted) {
            return false;
        }
        self.rows_seen += 1;
        self.rows_seen == self.planted.occasion()
    }

    fn plant_in_table(&mut self, plan: &StepPlan, row: &Row, table: &mut [PageId]) {
        let used = row.first_pos.div_ceil(self.page_tokens);
        if used >= 2 && self.hit(|p| matches!(p, Planted::SwappedPages(_))) {
            table.swap(0, 1);
        }
        let foreign = plan.rows.iter().find(|other| other.request != row.request);
        if let Some(other) = foreign
            && used >= 1
            && plan.row_pages(other)[0] != table[0]
            && self.hit(|p| matches!(p, Planted::ForeignPage(_)))
        {
            table[0] = plan.row_pages(other)[0];
        }
    }

    fn move_bytes(&mut self, plan: &CopyPlan, garbage: bool) {
        let size = self.page_tokens as usize;
        for (from, to) in plan.from.1.iter().zip(&plan.to.1) {
            let source = self.memory.get(&plan.from.0);
            let start = from.index() * size;
            let read = |slot| {
                source
                    .and_then(|m: &Vec<u64>| m.get(slot).copied())
                    .unwrap_or(0)
            };
            let bytes: Vec<u64> = (start..start + size)
                .map(|slot| if garbage { GARBAGE } else { read(slot) })
                .collect();
            let target = self.memory.entry(plan.to.0).or_default();
            let start = to.index() * size;
            if target.len() < start + size {
                target.resize(start + size, 0);
            }
            target[start..start + size].copy_from_slice(&bytes);
        }
    }
}

impl CopyEngine for EngineDouble {
    fn submit(&mut self, plan: CopyPlan) -> Result<(), (CopyPlan, Full)> {
        if self.copies.len() >= COPIES_MAX {
            return Err((plan, Full));
        }
        let polls_left = self.rng.below(self.copy_delay_max + 1);
        let fails = self.rng.percent(self.copy_failures);
        self.copies.push(Copy {
            plan,
            polls_left,
            fails,
            early: false,
        });
        Ok(())
    }

    /// Bytes move when a copy is acknowledged, as late as can be.
    fn poll(&mut self, done: &mut Vec<CopyDone>) {
        if self.hold_copies {
            return;
        }
        let mut waiting = Vec::new();
        for mut copy in std::mem::take(&mut self.copies) {
            let up = copy.plan.from.0 == TierId::Host;
            if copy.polls_left > 0 {
                copy.polls_left -= 1;
                waiting.push(copy);
                continue;
            }
            if !copy.early && up && !copy.fails && self.hit(|p| matches!(p, Planted::EarlyCopy(_)))
            {
                done.push(acknowledge(&copy.plan, true));
                (copy.early, copy.polls_left) = (true, 12);
                waiting.push(copy);
                continue;
            }
            let believed = copy.fails && self.hit(|p| matches!(p, Planted::BelievedCopy(_)));
            if !self.hit(|p| matches!(p, Planted::LostCopy(_))) {
                self.move_bytes(&copy.plan, copy.fails);
            }
            if copy.early {
                continue;
            }
            let ok = !copy.fails || believed;
            self.copies_failed += u64::from(!ok);
            self.copies_done[usize::from(up)] += u64::from(ok);
            self.finished_copies.insert(copy.plan.id);
            if !ok {
                self.failed_copies.insert(copy.plan.id);
            }
            done.push(acknowledge(&copy.plan, ok));
        }
        self.copies = waiting;
        while self.finished_copies.len() > 1024 {
            self.finished_copies.pop_first();
        }
        while self.failed_copies.len() > 1024 {
            self.failed_copies.pop_first();
        }
    }
}

fn acknowledge(plan: &CopyPlan, ok: bool) -> CopyDone {
    CopyDone { id: plan.id, ok }
}

/// A page that a row of `writing` writes and a row of another request in `reading` names.
fn foreign_write(writing: &StepPlan, reading: &StepPlan, page_tokens: u32) -> Option<String> {
    for writer in &writing.rows {
        let written = written_pages(writing, writer, page_tokens);
        for reader in reading
            .rows
            .iter()
            .filter(|row| row.request != writer.request)
        {
            let table = reading.row_pages(reader);
            if let Some(page) = table.iter().find(|page| written.contains(page)) {
                return Some(format!(
                    "page {} is in the table of request {} in step {} and written for request {} \
                     in step {}",
                    page.get(),
                    reader.request.0,
                    reading.id.0,
                    writer.request.0,
                    writing.id.0
                ));
            }
        }
    }
    None
}

/// Pages on which a row writes, guesses included.
fn written_pages<'a>(plan: &'a StepPlan, row: &Row, page_tokens: u32) -> &'a [PageId] {
    let first = row.first_pos / page_tokens;
    let end = (row.first_pos + row.len + u32::from(row.drafts)).div_ceil(page_tokens);
    let table = &plan.page_tables[row.pages.start as usize..row.pages.end as usize];
    &table[first as usize..end as usize]
}
