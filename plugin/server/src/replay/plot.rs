//! The hit curves as an SVG file: capacity on a logarithmic axis, one line a policy.

use super::columns::Swept;
use super::report::{Entry, INFINITE, OPTIMUM, Report};
use crate::chart::{Axis, Chart, Line, Scale, Stroke, Tick, short};

/// The chart of a report.
pub(crate) fn svg(report: &Report) -> String {
    let top = report.results.iter().map(|entry| entry.hit_ratio);
    // A tenth more than the highest, on a round number.
    let ratio_max = ((top.fold(0.0, f64::max) * 11.0).ceil() / 10.0).clamp(0.1, 1.0);
    let tenths = (0..=10_u32).map(|tenth| f64::from(tenth) / 10.0);
    let ratios = tenths.filter(|ratio| *ratio <= ratio_max + 1e-9);
    let lines = report
        .results
        .chunk_by(|one, next| one.policy == next.policy);
    let chart = Chart {
        title: format!(
            "{}: {} requests, hit ratio in blocks of {} tokens",
            report.trace, report.requests, report.page_tokens
        ),
        x: sizes(report, lines.clone().next().unwrap_or_default()),
        y: Axis {
            scale: Scale::Linear,
            from: 0.0,
            to: ratio_max,
            ticks: ratios
                .map(|at| Tick {
                    at,
                    label: format!("{at:.1}"),
                })
                .collect(),
            name: String::new(),
        },
        lines: lines.map(|entries| line(report.swept, entries)).collect(),
    };
    chart.svg()
}

#[expect(clippy::cast_precision_loss, reason = "a position on a chart")]
const fn place(tokens: u64) -> f64 {
    tokens as f64
}

/// The axis of the sizes that one line has.
fn sizes(report: &Report, line: &[Entry]) -> Axis {
    let size = |entry: &Entry| entry.swept_tokens(report.swept);
    let tick = |entry: &Entry| Tick {
        at: place(size(entry)),
        label: short(size(entry)),
    };
    let ends = [line.first(), line.last()].map(|entry| entry.map_or(1, size));
    Axis {
        // No logarithm of nothing.
        scale: if ends[0] == 0 {
            Scale::Linear
        } else {
            Scale::Log
        },
        from: place(ends[0]),
        to: place(ends[1]),
        ticks: line.iter().map(tick).collect(),
        name: report.axis(),
    }
}

fn line(swept: Swept, entries: &[Entry]) -> Line {
    let name = entries.first().map_or("", |entry| entry.policy);
    let point = |entry: &Entry| (place(entry.swept_tokens(swept)), entry.hit_ratio);
    Line {
        name: name.to_owned(),
        stroke: match name {
            INFINITE => Stroke::Dotted,
            OPTIMUM => Stroke::Dashed,
            _ => Stroke::Solid,
        },
        marked: true,
        points: entries.iter().map(point).collect(),
    }
}
