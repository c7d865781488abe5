//! The times to the first token as an SVG file: for each class the part of its calls that took no
//! longer, over the time on a logarithmic axis.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::report::Report;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 56.0;

/// Distinguishable without color vision defects getting in the way (Okabe and Ito).
const COLORS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];

/// The chart of a report.
pub(super) fn svg(report: &Report) -> String {
    let mut classes: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for call in report.calls.iter().filter(|call| call.error.is_none()) {
        let times = classes.entry(&call.class).or_default();
        times.push(call.ttft_s.max(1e-4));
    }
    for times in classes.values_mut() {
        times.sort_by(f64::total_cmp);
    }
    let mut out = String::new();
    // Writing to a string does not fail.
    draw(&mut out, &classes).unwrap_or_default();
    out
}

/// Powers of ten that hold all values.
fn decades(classes: &BTreeMap<&str, Vec<f64>>) -> (i32, i32) {
    let all = || classes.values().flatten().copied();
    let (low, high) = (all().fold(1.0, f64::min), all().fold(0.1, f64::max));
    let power = |value: f64| {
        (-4..=4)
            .filter(|power| 10_f64.powi(*power) <= value)
            .max()
            .unwrap_or(-4)
    };
    (power(low), power(high) + 1)
}

fn draw(out: &mut String, classes: &BTreeMap<&str, Vec<f64>>) -> std::fmt::Result {
    let (first, last) = decades(classes);
    let span = f64::from(last - first).max(1.0);
    let (right, floor) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let x = |s: f64| LEFT + (s.log10() - f64::from(first)) / span * (right - LEFT);
    let y = |part: f64| floor - part * (floor - TOP);
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"14\">Part of the calls with a first token within \
         the time</text>"
    )?;
    for power in first..=last {
        let (at, label) = (x(10_f64.powi(power)), 10_f64.powi(power + 3));
        writeln!(
            out,
            "<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{floor}\" stroke=\"#ddd\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label} ms</text>",
            floor + 18.0
        )?;
    }
    for quarter in 0..=4_u32 {
        let (part, text) = (f64::from(quarter) / 4.0, quarter * 25);
        writeln!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{0:.1}\" x2=\"{right}\" y2=\"{0:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{1}\" y=\"{2:.1}\" text-anchor=\"end\">{text} %</text>",
            y(part),
            LEFT - 8.0,
            y(part) + 4.0
        )?;
    }
    for (index, (class, times)) in classes.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let count = times.len().max(1) as f64;
        let mut points = String::new();
        for (at, &s) in times.iter().enumerate() {
            let part = (at + 1) as f64 / count;
            write!(points, "{:.1},{:.1} ", x(s), y(part))?;
        }
        writeln!(
            out,
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"{color}\">{class}</text>",
            right + 10.0,
            TOP + 16.0 * (index as f64 + 1.0)
        )?;
    }
    out.write_str("</svg>\n")
}

#[cfg(test)]
mod tests {
    use super::super::report::Call;
    use super::*;

    #[test]
    fn each_class_has_its_line_within_the_frame() {
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
        let points = text.split("points=\"").skip(1);
        let points = points.flat_map(|rest| rest.split('"').next().unwrap_or("").split(' '));
        for point in points.filter(|point| !point.is_empty()) {
            let (x, y) = point.split_once(',').unwrap();
            let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
            assert!((LEFT..=WIDTH - RIGHT).contains(&x) && (TOP..=HEIGHT - BOTTOM).contains(&y));
        }
        assert!(svg(&Report::default()).ends_with("</svg>\n"));
    }
}
