//! What came of a run: each call, and percentiles by class and turn.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

/// One call and its answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Call {
    /// Whose it was.
    pub class: String,
    /// Which program of the class.
    pub program: u32,
    /// Which turn of it, from 0.
    pub turn: u32,
    /// Seconds from the beginning of the run.
    pub start_s: f64,
    /// Seconds to the first token.
    pub ttft_s: f64,
    /// Seconds to the end.
    pub total_s: f64,
    /// Tokens of the prompt, as the server counts.
    pub prompt_tokens: u64,
    /// Of those, found in its cache.
    pub cached_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
    /// Why there was no answer.
    pub error: Option<String>,
}

/// A group of calls.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Group {
    /// Class, and turn from 1, or `all`.
    pub name: String,
    /// Answered calls.
    pub calls: usize,
    /// Calls that failed.
    pub errors: usize,
    /// Seconds to the first token: p50, p90, p95, p99.
    pub ttft_s: [f64; 4],
    /// Seconds to the end, the same.
    pub total_s: [f64; 4],
    /// Part of the prompt tokens that was cached.
    pub hit_ratio: f64,
    /// Output tokens a second over the whole run.
    pub output_tokens_per_s: f64,
}

/// All of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Seconds from the first call to the end of the last.
    pub seconds: f64,
    /// By class, then by class and turn.
    pub groups: Vec<Group>,
    /// The calls in the order of their ends.
    pub calls: Vec<Call>,
}

/// The percentiles that are told.
pub(super) const PERCENTILES: [u8; 4] = [50, 90, 95, 99];

impl Report {
    /// The summary of calls.
    pub fn of(calls: Vec<Call>) -> Report {
        let ends = calls.iter().map(|call| call.start_s + call.total_s);
        let seconds = ends.fold(0.0, f64::max);
        let mut groups: BTreeMap<(String, Option<u32>), Vec<&Call>> = BTreeMap::new();
        for call in &calls {
            for turn in [None, Some(call.turn)] {
                let key = (call.class.clone(), turn);
                groups.entry(key).or_default().push(call);
            }
        }
        let one_turn = |class: &str| {
            let turns = calls.iter().filter(|call| call.class == class);
            let mut turns = turns.map(|call| call.turn);
            let first = turns.next();
            turns.all(|turn| Some(turn) == first)
        };
        let groups = groups
            .iter()
            .filter(|((class, turn), _)| turn.is_none() || !one_turn(class))
            .map(|((class, turn), calls)| {
                let name = match turn {
                    Some(turn) => format!("{class}, turn {}", turn + 1),
                    None => format!("{class}, all"),
                };
                Group::of(name, calls, seconds)
            })
            .collect();
        Report {
            seconds,
            groups,
            calls,
        }
    }

    /// A table for people.
    pub fn table(&self) -> String {
        let mut out = format!("{:.1} s\n", self.seconds);
        let width = self.groups.iter().map(|group| group.name.len()).max();
        let width = width.unwrap_or(0).max(5);
        // Writing to a string does not fail.
        let _always = writeln!(
            out,
            "{:width$} {:>6} {:>6} | TTFT ms {:>7} {:>7} {:>7} | total ms {:>7} {:>7} | {:>5} \
             {:>8}",
            "class", "calls", "errors", "p50", "p95", "p99", "p50", "p95", "hits", "tokens/s"
        );
        for group in &self.groups {
            let ms = |s: f64| s * 1e3;
            let _always = writeln!(
                out,
                "{:width$} {:>6} {:>6} |         {:>7.0} {:>7.0} {:>7.0} |          {:>7.0} \
                 {:>7.0} | {:>5.2} {:>8.1}",
                group.name,
                group.calls,
                group.errors,
                ms(group.ttft_s[0]),
                ms(group.ttft_s[2]),
                ms(group.ttft_s[3]),
                ms(group.total_s[0]),
                ms(group.total_s[2]),
                group.hit_ratio,
                group.output_tokens_per_s
            );
        }
        if let Some(error) = self.calls.iter().find_map(|call| call.error.as_ref()) {
            let _always = writeln!(out, "first error: {error}");
        }
        out
    }
}

impl Group {
    fn of(name: String, calls: &[&Call], seconds: f64) -> Group {
        let answered: Vec<&&Call> = calls.iter().filter(|call| call.error.is_none()).collect();
        let sum = |of: fn(&Call) -> u64| answered.iter().map(|call| of(call)).sum::<u64>() as f64;
        let all = |of: fn(&Call) -> f64| {
            let mut values: Vec<f64> = answered.iter().map(|call| of(call)).collect();
            values.sort_by(f64::total_cmp);
            PERCENTILES.map(|percent| percentile(&values, percent))
        };
        Group {
            name,
            calls: answered.len(),
            errors: calls.len() - answered.len(),
            ttft_s: all(|call| call.ttft_s),
            total_s: all(|call| call.total_s),
            hit_ratio: sum(|call| call.cached_tokens) / sum(|call| call.prompt_tokens).max(1.0),
            output_tokens_per_s: sum(|call| call.output_tokens) / seconds.max(1e-9),
        }
    }
}

/// The least value that at least `percent` of the ascending values do not exceed; 0 without values.
pub(super) fn percentile(values: &[f64], percent: u8) -> f64 {
    let rank = (values.len() * usize::from(percent)).div_ceil(100);
    values
        .get(rank.saturating_sub(1))
        .copied()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(class: &str, turn: u32, ttft_s: f64) -> Call {
        Call {
            class: class.to_owned(),
            turn,
            ttft_s,
            total_s: 2.0,
            prompt_tokens: 100,
            cached_tokens: 50,
            output_tokens: 10,
            ..Call::default()
        }
    }

    #[test]
    fn percentiles_are_values_that_were_seen() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(
            [50, 95, 99, 100].map(|p| percentile(&values, p)),
            [50.0, 95.0, 99.0, 100.0]
        );
        assert_eq!(percentile(&[7.0], 50), 7.0);
        assert_eq!(percentile(&[1.0, 2.0, 3.0], 50), 2.0);
        assert_eq!(percentile(&[], 50), 0.0);
    }

    #[test]
    fn calls_are_grouped_by_class_and_turn_and_failures_are_no_times() {
        let mut failed = call("user", 1, 0.0);
        failed.error = Some("429".to_owned());
        let calls = vec![
            call("user", 0, 0.3),
            call("user", 1, 0.1),
            failed,
            call("last", 3, 0.5),
        ];
        let report = Report::of(calls);
        let names: Vec<&str> = report.groups.iter().map(|g| g.name.as_str()).collect();
        let wanted = ["last, all", "user, all", "user, turn 1", "user, turn 2"];
        assert_eq!(names, wanted);
        let second = &report.groups[3];
        assert_eq!((second.calls, second.errors), (1, 1));
        assert_eq!(second.ttft_s[0], 0.1);
        assert_eq!(second.hit_ratio, 0.5);
        assert_eq!(report.groups[1].output_tokens_per_s, 10.0);
        assert!(report.table().contains("first error: 429"));
    }
}
