//! What `rootstock top` has seen of a server: the newest answers, and older numbers for rates.

use std::collections::VecDeque;

use serde::Deserialize;
use serde_json::Value;

/// Samples that are kept; rates and times are over these.
const SAMPLES_MAX: usize = 30;

/// A part of the tree, as `/v1/kv/picture` tells it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Part {
    /// The part above it.
    pub parent: Option<usize>,
    /// The node; none where it is several.
    pub id: Option<String>,
    /// How many nodes; absent is one.
    pub nodes: Option<u64>,
    /// Pages in it.
    pub pages: u64,
    /// Pages in and below it; absent is as many as in it.
    pub below: Option<u64>,
    /// Pages that only host has.
    pub host: u64,
    /// Pages on their way.
    pub moving: u64,
    /// What most of it is; empty where nobody told.
    pub kind: String,
    /// How often it was found.
    pub hits: u64,
    /// Pages that pins keep.
    pub pinned: u64,
    /// Seconds until the last of those pins ends.
    pub pin_left_s: Option<u64>,
    /// Requests use it now.
    pub used: bool,
}

impl Part {
    /// Pages in and below it.
    pub fn weight(&self) -> u64 {
        self.below.unwrap_or(self.pages)
    }
}

/// A program.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Program {
    /// By the name its client gives.
    pub name: String,
    /// Pages of its newest prefix.
    pub pages: u64,
    /// Requests that ended.
    pub turns: u64,
    /// Requests that run.
    pub running: u64,
    /// It has said so.
    pub done: bool,
    /// Since its last request.
    pub seen_s_ago: f64,
    /// Until the next is expected; below 0 is late.
    pub expected_in_s: Option<f64>,
}

/// The tree and its programs.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Picture {
    /// Tokens of a page.
    pub page_tokens: u64,
    /// All nodes.
    pub nodes: u64,
    /// All pages.
    pub pages: u64,
    /// Parents before children.
    pub parts: Vec<Part>,
    /// The one that asked last first.
    pub programs: Vec<Program>,
}

impl Picture {
    /// The parts as rows: how far each is indented, and which it is. What is largest comes first.
    pub fn rows(&self) -> Vec<(usize, usize)> {
        let mut children: Vec<Vec<usize>> = vec![Vec::new(); self.parts.len()];
        let mut open = Vec::new();
        for (index, part) in self.parts.iter().enumerate() {
            match part.parent.and_then(|up| children.get_mut(up)) {
                Some(siblings) => siblings.push(index),
                None => open.push(index),
            }
        }
        // The last of the stack comes first: several together come behind those that are one.
        let key = |index: &usize| {
            let part = self.parts.get(*index);
            part.map(|part| (part.id.is_some(), part.weight()))
        };
        open.sort_by_key(key);
        let mut open: Vec<(usize, usize)> = open.into_iter().map(|index| (0, index)).collect();
        let mut rows = Vec::with_capacity(self.parts.len());
        while let Some((depth, index)) = open.pop() {
            rows.push((depth, index));
            let mut below = children
                .get_mut(index)
                .map(std::mem::take)
                .unwrap_or_default();
            below.sort_by_key(key);
            open.extend(below.into_iter().map(|child| (depth + 1, child)));
        }
        rows
    }
}

/// Everything seen so far.
#[derive(Debug, Default)]
pub struct Seen {
    /// The newest picture.
    pub picture: Picture,
    /// (seconds on any clock, `/v1/kv/stats`), the newest last.
    samples: VecDeque<(f64, Value)>,
    /// Why there is nothing newer.
    pub trouble: Option<String>,
}

impl Seen {
    /// Takes an answer; a server may refuse to tell numbers that are about everybody.
    pub fn take(&mut self, at_s: f64, picture: Picture, stats: Option<Value>) {
        self.picture = picture;
        self.trouble = None;
        if let Some(stats) = stats {
            if self.samples.len() == SAMPLES_MAX {
                self.samples.pop_front();
            }
            self.samples.push_back((at_s, stats));
        }
    }

    /// The newest numbers.
    pub fn stats(&self) -> Option<&Value> {
        self.samples.back().map(|(_, stats)| stats)
    }

    /// A number of the newest sample; 0 where there is none.
    pub fn number(&self, path: &str) -> f64 {
        self.stats().map_or(0.0, |stats| number(stats, path))
    }

    /// What counters grew by from the oldest sample on.
    fn grown(&self, paths: &[&str]) -> f64 {
        let sum = |stats: &Value| paths.iter().map(|path| number(stats, path)).sum::<f64>();
        match (self.samples.front(), self.samples.back()) {
            (Some((_, first)), Some((_, last))) => sum(last) - sum(first),
            _ => 0.0,
        }
    }

    /// What counters grow by in a second.
    pub fn rate(&self, paths: &[&str]) -> f64 {
        let (Some((from, _)), Some((to, _))) = (self.samples.front(), self.samples.back()) else {
            return 0.0;
        };
        let span = to - from;
        if span > 0.0 {
            self.grown(paths) / span
        } else {
            0.0
        }
    }

    /// One sum of counters by another: over the samples, or since the start of the server where
    /// nothing has happened since.
    pub fn ratio(&self, of: &[&str], by: &[&str]) -> Option<f64> {
        let by_grown = self.grown(by);
        if by_grown > 0.0 {
            return Some(self.grown(of) / by_grown);
        }
        let all = |paths: &[&str]| paths.iter().map(|path| self.number(path)).sum::<f64>();
        let by_all = all(by);
        (by_all > 0.0).then(|| all(of) / by_all)
    }

    /// The time within which a share of what a histogram of `times` holds lies.
    pub fn quantile(&self, name: &str, share: f64) -> Option<f64> {
        let counts = |stats: &Value| -> Vec<f64> {
            let counts = stats["times"][name]["counts"].as_array();
            counts
                .into_iter()
                .flatten()
                .filter_map(Value::as_f64)
                .collect()
        };
        let last = counts(self.stats()?);
        let first = self.samples.front().map(|(_, stats)| counts(stats))?;
        let fresh: Vec<f64> = last
            .iter()
            .zip(first)
            .map(|(now, then)| now - then)
            .collect();
        let counts = if fresh.iter().sum::<f64>() > 0.0 {
            fresh
        } else {
            last
        };
        let all: f64 = counts.iter().sum();
        let bounds = self.stats()?["times"]["bounds_s"].as_array()?;
        let mut left = all * share;
        let mut low = 0.0;
        for (index, count) in counts.iter().enumerate() {
            let high = bounds
                .get(index)
                .and_then(Value::as_f64)
                .unwrap_or(low * 2.0);
            if *count > 0.0 && left <= *count {
                return Some(low + (high - low) * left / count);
            }
            left -= count;
            low = high;
        }
        None
    }
}

fn number(stats: &Value, path: &str) -> f64 {
    stats
        .pointer(path)
        .and_then(Value::as_f64)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_go_down_the_largest_branch_first_and_what_is_several_comes_last() {
        let parts = json!([
            {"pages": 4, "below": 30, "id": "1.1"},
            {"pages": 6, "id": "2.1", "parent": 0},
            {"pages": 9, "id": "3.1", "parent": 0},
            {"pages": 90, "id": "4.1"},
            {"pages": 11, "nodes": 7, "parent": 0},
        ]);
        let picture = Picture {
            parts: serde_json::from_value(parts).unwrap(),
            ..Picture::default()
        };
        assert_eq!(picture.rows(), [(0, 3), (0, 0), (1, 2), (1, 1), (1, 4)]);
    }

    #[test]
    fn rates_are_over_the_samples_and_ratios_since_the_start_when_nothing_happened() {
        let sample = |tokens: u64, counts: [u64; 3]| {
            json!({"requests": {"a": tokens, "b": 2 * tokens}, "times": {
                "bounds_s": [0.1, 0.2], "ttft": {"counts": counts}}})
        };
        let mut seen = Seen::default();
        assert_eq!(seen.ratio(&["/requests/a"], &["/requests/b"]), None);
        assert_eq!(seen.quantile("ttft", 0.5), None);
        seen.take(10.0, Picture::default(), Some(sample(100, [8, 0, 0])));
        assert_eq!(seen.rate(&["/requests/a"]), 0.0);
        assert_eq!(seen.ratio(&["/requests/a"], &["/requests/b"]), Some(0.5));
        assert_eq!(seen.quantile("ttft", 0.5), Some(0.05));
        seen.take(14.0, Picture::default(), Some(sample(180, [8, 4, 0])));
        assert_eq!(seen.rate(&["/requests/a"]), 20.0);
        let median = seen.quantile("ttft", 0.5).unwrap();
        assert!((median - 0.15).abs() < 1e-9, "{median}");
    }
}
