//! Pins that come with a request: applied once its prompt is cached, and told to its caller.

use rootstock_radix::{Action, Outcome, Target};

use crate::emit::PinReport;
use crate::live::Live;
use crate::scheduler::Cx;
use crate::stats::SchedulerStats;

impl Live {
    /// Pins what the hints ask for, when the whole prompt has been computed and for the first time.
    /// A pin covers whole pages: what is left over at its end is not pinned.
    pub(crate) fn apply_pins(
        &mut self,
        cx: &mut Cx<'_>,
        page_tokens: u32,
        stats: &mut SchedulerStats,
    ) {
        let complete = self
            .running()
            .is_some_and(|run| run.computed >= self.prompt_tokens);
        if self.pins.is_some() || self.hints.pins.is_empty() || !complete {
            return;
        }
        let mut report = PinReport::default();
        for &(tokens, ttl) in &self.hints.pins {
            let end = tokens.min(self.prompt_tokens) as usize;
            let target = Target::Prefix {
                ns: self.ns,
                tokens: self.tokens[..end].to_vec(),
            };
            let outcome = cx
                .cache
                .act(self.tenant, &Action::Pin { target, ttl }, cx.now);
            report.count(outcome);
            let asked_pages = tokens.min(self.prompt_tokens) / page_tokens;
            report.asked_pages = report.asked_pages.max(asked_pages);
        }
        stats.count_pins(&report);
        self.pins = Some(report);
    }
}

impl PinReport {
    fn count(&mut self, outcome: Outcome) {
        self.asked += 1;
        let pages = match outcome {
            Outcome::Accepted { pages } | Outcome::Deferred { pages } => {
                self.accepted += 1;
                pages
            }
            Outcome::Clipped { pages, .. } => {
                self.clipped += 1;
                pages
            }
            Outcome::Rejected(_) | Outcome::Missing => {
                self.rejected += 1;
                0
            }
        };
        self.pages = self.pages.max(pages);
    }
}
