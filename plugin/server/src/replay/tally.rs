//! What the requests of one replay came to: blocks found by tier, tokens of prefill saved, and,
//! with a model of step times, how long each prompt would have taken.

use super::step_model::StepModel;
use super::trace::Trace;

/// Blocks that one request found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) device: u32,
    /// Copied up from host.
    pub(crate) host: u32,
    /// Read from storage first.
    pub(crate) storage: u32,
}

impl Found {
    pub(crate) const fn all(self) -> u32 {
        self.device + self.host + self.storage
    }
}

/// Seconds of a percentile of the requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Times {
    /// Of the prefill alone, at the median.
    pub prefill_p50_s: f64,
    /// The same at p95.
    pub prefill_p95_s: f64,
    /// From arrival to the first token where prompts are computed one at a time as they arrive.
    pub ttft_p50_s: f64,
    /// The same at p95.
    pub ttft_p95_s: f64,
}

/// Sums over the requests of one replay.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) hits: u64,
    pub(crate) host_hits: u64,
    pub(crate) storage_hits: u64,
    /// Tokens of prompts that were not computed; at least one of each prompt is.
    pub(crate) saved_tokens: u64,
    pub(crate) times: Option<Times>,
}

/// Takes the requests in their order.
#[derive(Debug)]
pub(crate) struct Tally<'a> {
    trace: &'a Trace,
    page_tokens: u32,
    model: Option<&'a StepModel>,
    totals: Totals,
    prefills_ns: Vec<u64>,
    ttfts_ns: Vec<u64>,
    /// When the prompt before is computed.
    free_ns: u64,
}

impl<'a> Tally<'a> {
    pub(crate) fn new(trace: &'a Trace, page_tokens: u32, model: Option<&'a StepModel>) -> Self {
        Self {
            trace,
            page_tokens,
            model,
            totals: Totals::default(),
            prefills_ns: Vec::new(),
            ttfts_ns: Vec::new(),
            free_ns: 0,
        }
    }

    /// Request number `request` found this much.
    pub(crate) fn add(&mut self, request: usize, found: Found) {
        let prompt = self.trace.prompt_tokens(request, self.page_tokens);
        // A partial last block counts as one, and the last token is computed in any case.
        let cached = u64::from(found.all()) * u64::from(self.page_tokens);
        let cached = cached.min(prompt.saturating_sub(1));
        let totals = &mut self.totals;
        totals.hits += u64::from(found.all());
        totals.host_hits += u64::from(found.host);
        totals.storage_hits += u64::from(found.storage);
        totals.saved_tokens += cached;
        let Some(model) = self.model else { return };
        let prefill = model.prefill_ns(prompt, cached);
        let arrival = self.trace.arrival_ns(request);
        self.free_ns = self.free_ns.max(arrival).saturating_add(prefill);
        self.prefills_ns.push(prefill);
        self.ttfts_ns.push(self.free_ns - arrival);
    }

    pub(crate) fn totals(mut self) -> Totals {
        if self.model.is_some() {
            let [prefill_p50_s, prefill_p95_s] = percentiles(&mut self.prefills_ns);
            let [ttft_p50_s, ttft_p95_s] = percentiles(&mut self.ttfts_ns);
            self.totals.times = Some(Times {
                prefill_p50_s,
                prefill_p95_s,
                ttft_p50_s,
                ttft_p95_s,
            });
        }
        self.totals
    }
}

/// Seconds at the median and at p95.
fn percentiles(values_ns: &mut [u64]) -> [f64; 2] {
    values_ns.sort_unstable();
    [50, 95].map(|percent| {
        let rank = (values_ns.len() * percent).div_ceil(100);
        let value = values_ns.get(rank.saturating_sub(1)).copied();
        std::time::Duration::from_nanos(value.unwrap_or_default()).as_secs_f64()
    })
}

#[cfg(test)]
mod tests {
    use super::super::trace::TraceBuilder;
    use super::*;

    /// Two prompts of 40 tokens in blocks of 16, a second apart.
    fn trace() -> Trace {
        let mut builder = TraceBuilder::default();
        for arrival_s in [0, 1] {
            builder
                .push(1, arrival_s * 1_000_000_000, &[1, 2, 3])
                .unwrap();
            builder.measure(Some(40));
        }
        builder.in_file_order().unwrap()
    }

    #[test]
    fn a_prompt_saves_no_more_than_it_has_and_never_its_last_token() {
        let trace = trace();
        let mut tally = Tally::new(&trace, 16, None);
        tally.add(0, Found::default());
        let all = Found {
            device: 1,
            host: 1,
            storage: 1,
        };
        tally.add(1, all);
        let totals = tally.totals();
        assert_eq!(
            (totals.hits, totals.host_hits, totals.storage_hits),
            (3, 1, 1)
        );
        assert_eq!(totals.saved_tokens, 39);
        assert_eq!(totals.times, None);
    }

    #[test]
    fn prompts_wait_for_those_before_them() {
        let trace = trace();
        // 50 ms a token: the first prompt takes 2 s, so that the second waits one.
        let model = StepModel::of_rate(50_000_000);
        let mut tally = Tally::new(&trace, 16, Some(&model));
        tally.add(0, Found::default());
        let one = Found {
            device: 1,
            ..Found::default()
        };
        tally.add(1, one);
        let times = tally.totals().times.unwrap();
        let near = |is: f64, wanted: f64| (is / wanted - 1.0).abs() < 0.02;
        assert!(
            near(times.prefill_p50_s, 1.2) && near(times.prefill_p95_s, 2.0),
            "{times:?}"
        );
        assert!(
            near(times.ttft_p50_s, 2.0) && near(times.ttft_p95_s, 2.2),
            "{times:?}"
        );
    }
}
