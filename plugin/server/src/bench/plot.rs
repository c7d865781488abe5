//! The times to the first token as an SVG file: for each class the part of its calls that took no
//! longer, over the time on a logarithmic axis.

use std::collections::BTreeMap;

use super::report::Report;
use crate::chart::{Axis, Chart, Line, Scale, Stroke, Tick};

/// The chart of a report.
pub(super) fn svg(report: &Report) -> String {
    let mut classes: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for call in report.calls.iter().filter(|call| call.error.is_none()) {
        let times = classes.entry(&call.class).or_default();
        times.push(call.ttft_s.max(1e-4));
    }
    let lines = classes.into_iter().map(|(class, mut times)| {
        times.sort_by(f64::total_cmp);
        let count = times.len() as f64;
        let points = times.iter().enumerate();
        Line {
            name: class.to_owned(),
            stroke: Stroke::Solid,
            marked: false,
            points: points
                .map(|(at, &s)| (s, (at + 1) as f64 / count))
                .collect(),
        }
    });
    let lines: Vec<Line> = lines.collect();
    let times = lines
        .iter()
        .flat_map(|line| &line.points)
        .map(|point| point.0);
    let quarters = [0.0, 0.25, 0.5, 0.75, 1.0];
    let chart = Chart {
        title: "Part of the calls with a first token within the time".to_owned(),
        x: Axis::decades(times, "", |s| format!("{} ms", s * 1e3)),
        y: Axis {
            scale: Scale::Linear,
            from: 0.0,
            to: 1.0,
            ticks: quarters
                .map(|at| Tick {
                    at,
                    label: format!("{} %", at * 100.0),
                })
                .to_vec(),
            name: String::new(),
        },
        lines,
    };
    chart.svg()
}

#[cfg(test)]
mod tests {
    use super::super::report::Call;
    use super::*;

    #[test]
    fn each_class_has_its_line_and_the_axis_its_decades() {
        let call = |class: &str, ttft_s| Call {
            class: class.to_owned(),
            ttft_s,
            ..Call::default()
        };
        let calls = vec![
            call("user", 0.02),
            call("user", 0.3),
            call("background", 4.0),
        ];
        let text = svg(&Report::of(calls));
        assert_eq!(text.matches("<polyline").count(), 2);
        assert!(
            text.contains(">10 ms<") && text.contains(">10000 ms<"),
            "{text}"
        );
        assert!(svg(&Report::default()).ends_with("</svg>\n"));
    }
}
