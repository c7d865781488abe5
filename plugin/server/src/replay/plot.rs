//! The hit curves as an SVG file: capacity on a logarithmic axis, one line a policy. Written by
//! hand, as a chart of a few polylines needs no plotting library.

use std::fmt::Write;

use super::report::{Entry, INFINITE, OPTIMUM, Report};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 130.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 56.0;

/// Distinguishable without color vision defects getting in the way (Okabe and Ito).
const COLORS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];

/// Where figures come to lie on the page.
struct Scale {
    log_min: f64,
    log_span: f64,
    ratio_max: f64,
}

impl Scale {
    fn of(entries: &[Entry]) -> Self {
        let logs = || entries.iter().map(|entry| log2(entry.capacity_tokens));
        let (min, max) = (logs().fold(f64::MAX, f64::min), logs().fold(0.0, f64::max));
        let top = entries
            .iter()
            .map(|entry| entry.hit_ratio)
            .fold(0.0, f64::max);
        // A tenth more than the highest, on a round number.
        let ratio_max = ((top * 11.0).ceil() / 10.0).clamp(0.1, 1.0);
        Self {
            log_min: min.min(max),
            log_span: (max - min).max(1e-9),
            ratio_max,
        }
    }

    fn x(&self, capacity_tokens: u64) -> f64 {
        let share = (log2(capacity_tokens) - self.log_min) / self.log_span;
        LEFT + share * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, ratio: f64) -> f64 {
        HEIGHT - BOTTOM - ratio / self.ratio_max * (HEIGHT - TOP - BOTTOM)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a position on a chart")]
fn log2(tokens: u64) -> f64 {
    (tokens.max(1) as f64).log2()
}

/// The chart of a report.
pub(crate) fn svg(report: &Report) -> String {
    let scale = Scale::of(&report.results);
    let mut out = String::new();
    // Writing to a string does not fail.
    draw(&mut out, report, &scale).unwrap_or_default();
    out
}

fn draw(out: &mut String, report: &Report, scale: &Scale) -> std::fmt::Result {
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"14\">{}: {} requests, hit ratio in blocks of {} \
         tokens</text>",
        escaped(&report.trace),
        report.requests,
        report.page_tokens
    )?;
    draw_axes(out, report, scale)?;
    let lines = report
        .results
        .chunk_by(|one, next| one.policy == next.policy);
    let mut labels = Labels::default();
    for (line, color) in lines.zip(COLORS.iter().cycle()) {
        draw_line(out, line, color, scale, &mut labels)?;
    }
    out.write_str("</svg>\n")
}

fn draw_axes(out: &mut String, report: &Report, scale: &Scale) -> std::fmt::Result {
    let (right, floor) = (WIDTH - RIGHT, scale.y(0.0));
    for tenth in 0..=10_u32 {
        let ratio = f64::from(tenth) / 10.0;
        if ratio > scale.ratio_max + 1e-9 {
            break;
        }
        let (y, text) = (scale.y(ratio), LEFT - 8.0);
        writeln!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{text}\" y=\"{:.1}\" text-anchor=\"end\">{ratio:.1}</text>",
            y + 4.0
        )?;
    }
    let columns = report
        .results
        .chunk_by(|one, next| one.policy == next.policy)
        .next();
    for entry in columns.unwrap_or_default() {
        let x = scale.x(entry.capacity_tokens);
        writeln!(
            out,
            "<line x1=\"{x:.1}\" y1=\"{floor}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"#888\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            floor + 5.0,
            floor + 20.0,
            short(entry.capacity_tokens)
        )?;
    }
    writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">capacity in tokens</text>",
        f64::midpoint(LEFT, right),
        HEIGHT - 12.0
    )
}

fn draw_line(
    out: &mut String,
    line: &[Entry],
    color: &str,
    scale: &Scale,
    labels: &mut Labels,
) -> std::fmt::Result {
    let Some(last) = line.last() else {
        return Ok(());
    };
    let dash = match last.policy {
        INFINITE => " stroke-dasharray=\"2 4\"",
        OPTIMUM => " stroke-dasharray=\"7 3\"",
        _ => "",
    };
    write!(
        out,
        "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"{dash} points=\""
    )?;
    for entry in line {
        write!(
            out,
            "{:.1},{:.1} ",
            scale.x(entry.capacity_tokens),
            scale.y(entry.hit_ratio)
        )?;
    }
    out.write_str("\"/>\n")?;
    for entry in line {
        let (x, y) = (scale.x(entry.capacity_tokens), scale.y(entry.hit_ratio));
        writeln!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{color}\"/>"
        )?;
    }
    let (x, y) = (WIDTH - RIGHT + 10.0, labels.place(scale.y(last.hit_ratio)));
    writeln!(
        out,
        "<text x=\"{x}\" y=\"{y:.1}\" fill=\"{color}\">{}</text>",
        last.policy
    )
}

/// Heights of the names at the ends of the lines, kept apart.
#[derive(Default)]
struct Labels(Vec<f64>);

impl Labels {
    /// A free height at or below `wanted`.
    fn place(&mut self, wanted: f64) -> f64 {
        const APART: f64 = 14.0;
        let mut y = wanted + 4.0;
        while let Some(taken) = self
            .0
            .iter()
            .find(|taken| (**taken - y).abs() < APART - 1e-9)
        {
            y = taken + APART;
        }
        self.0.push(y);
        y
    }
}

/// `1.5M`, `256k`, `900`.
fn short(tokens: u64) -> String {
    let units = [(1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")];
    for (unit, letter) in units {
        if tokens >= unit {
            let text = format!("{}.{:02}", tokens / unit, tokens % unit * 100 / unit);
            return text.trim_end_matches('0').trim_end_matches('.').to_owned() + letter;
        }
    }
    tokens.to_string()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_are_shortened_without_losing_what_matters() {
        let texts = [900, 256_000, 1_048_576, 1_500_000, 2_000_000_000].map(short);
        assert_eq!(texts, ["900", "256k", "1.04M", "1.5M", "2G"]);
    }

    #[test]
    fn labels_of_lines_that_end_together_do_not_overlap() {
        let mut labels = Labels::default();
        let mut places = [100.0, 101.0, 100.0, 40.0].map(|y| labels.place(y));
        places.sort_by(f64::total_cmp);
        assert!(
            places.windows(2).all(|pair| pair[1] - pair[0] >= 13.9),
            "{places:?}"
        );
    }

    #[test]
    fn a_file_name_cannot_break_the_markup() {
        assert_eq!(escaped("a<b>&c"), "a&lt;b&gt;&amp;c");
    }
}
