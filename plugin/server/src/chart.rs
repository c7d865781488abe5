//! Line charts as SVG files: a title, two axes with the ticks that the caller names, and lines with
//! their names at their ends. Written by hand, as polylines need no plotting library.

use std::fmt::Write;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 56.0;

/// Distinguishable without color vision defects getting in the way (Okabe and Ito).
const COLORS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];

/// How values come to lie along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    Linear,
    Log,
}

/// A labelled place on an axis.
#[derive(Clone, Debug)]
pub(crate) struct Tick {
    pub(crate) at: f64,
    pub(crate) label: String,
}

/// One axis: its ends, and what is written beside it.
#[derive(Clone, Debug)]
pub(crate) struct Axis {
    pub(crate) scale: Scale,
    pub(crate) from: f64,
    pub(crate) to: f64,
    pub(crate) ticks: Vec<Tick>,
    /// Below the axis of x; that of y has its meaning in the title.
    pub(crate) name: String,
}

/// How a line is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stroke {
    Solid,
    Dashed,
    Dotted,
}

/// One line.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) stroke: Stroke,
    /// Whether its points are marked: not where there are very many.
    pub(crate) marked: bool,
    pub(crate) points: Vec<(f64, f64)>,
}

/// A chart.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) lines: Vec<Line>,
}

impl Axis {
    /// Where a value lies between the ends, 0 to 1; what is beyond them lies on them.
    fn share(&self, value: f64) -> f64 {
        let place = |value: f64| match self.scale {
            Scale::Linear => value,
            Scale::Log => value.max(f64::MIN_POSITIVE).log2(),
        };
        let (from, to) = (place(self.from), place(self.to));
        ((place(value) - from) / (to - from).max(1e-9)).clamp(0.0, 1.0)
    }

    /// A logarithmic axis of whole powers of ten around `values`, labelled by `label`.
    pub(crate) fn decades(
        values: impl Iterator<Item = f64>,
        name: &str,
        label: impl Fn(f64) -> String,
    ) -> Self {
        let (mut low, mut high) = (f64::MAX, f64::MIN_POSITIVE);
        for value in values.filter(|value| *value > 0.0) {
            (low, high) = (low.min(value), high.max(value));
        }
        let power = |value: f64| value.log10().floor().clamp(-12.0, 12.0);
        let first = power(low.min(high));
        let last = (power(high) + 1.0).max(first + 1.0);
        let powers = std::iter::successors(Some(first), |power| Some(power + 1.0));
        let places = powers.take_while(|power| *power <= last);
        let ticks = places.map(|power| {
            let at = 10_f64.powf(power);
            Tick {
                at,
                label: label(at),
            }
        });
        Self {
            scale: Scale::Log,
            from: 10_f64.powf(first),
            to: 10_f64.powf(last),
            ticks: ticks.collect(),
            name: name.to_owned(),
        }
    }
}

impl Chart {
    /// The chart as an SVG document.
    pub(crate) fn svg(&self) -> String {
        let mut out = String::new();
        // Writing to a string does not fail.
        self.draw(&mut out).unwrap_or_default();
        out
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + self.x.share(value) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - self.y.share(value) * (HEIGHT - TOP - BOTTOM)
    }

    fn draw(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
             viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"24\" font-size=\"14\">{}</text>",
            escaped(&self.title)
        )?;
        self.draw_axes(out)?;
        let mut labels = Labels::default();
        for (line, color) in self.lines.iter().zip(COLORS.iter().cycle()) {
            self.draw_line(out, line, color, &mut labels)?;
        }
        out.write_str("</svg>\n")
    }

    fn draw_axes(&self, out: &mut String) -> std::fmt::Result {
        let (right, floor) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for Tick { at, label } in &self.y.ticks {
            let y = self.y(*at);
            writeln!(
                out,
                "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 8.0,
                y + 4.0,
                escaped(label)
            )?;
        }
        for Tick { at, label } in &self.x.ticks {
            let x = self.x(*at);
            writeln!(
                out,
                "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"#ddd\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                floor + 5.0,
                floor + 20.0,
                escaped(label)
            )?;
        }
        writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            f64::midpoint(LEFT, right),
            HEIGHT - 12.0,
            escaped(&self.x.name)
        )
    }

    fn draw_line(
        &self,
        out: &mut String,
        line: &Line,
        color: &str,
        labels: &mut Labels,
    ) -> std::fmt::Result {
        let Some(&(_, last)) = line.points.last() else {
            return Ok(());
        };
        let dash = match line.stroke {
            Stroke::Solid => "",
            Stroke::Dashed => " stroke-dasharray=\"7 3\"",
            Stroke::Dotted => " stroke-dasharray=\"2 4\"",
        };
        write!(
            out,
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"{dash} points=\""
        )?;
        for &(x, y) in &line.points {
            write!(out, "{:.1},{:.1} ", self.x(x), self.y(y))?;
        }
        out.write_str("\"/>\n")?;
        for &(x, y) in line.points.iter().filter(|_| line.marked) {
            let (x, y) = (self.x(x), self.y(y));
            writeln!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{color}\"/>"
            )?;
        }
        let (x, y) = (WIDTH - RIGHT + 10.0, labels.place(self.y(last)));
        writeln!(
            out,
            "<text x=\"{x}\" y=\"{y:.1}\" fill=\"{color}\">{}</text>",
            escaped(&line.name)
        )
    }
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
pub(crate) fn short(count: u64) -> String {
    let units = [(1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")];
    for (unit, letter) in units {
        if count >= unit {
            let text = format!("{}.{:02}", count / unit, count % unit * 100 / unit);
            return text.trim_end_matches('0').trim_end_matches('.').to_owned() + letter;
        }
    }
    count.to_string()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(lines: Vec<Line>) -> Chart {
        let axis = |from, to| Axis {
            scale: Scale::Linear,
            from,
            to,
            ticks: Vec::new(),
            name: String::new(),
        };
        Chart {
            title: "a<b>&c".to_owned(),
            x: axis(0.0, 10.0),
            y: axis(0.0, 1.0),
            lines,
        }
    }

    #[test]
    fn counts_are_shortened_without_losing_what_matters() {
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
    fn what_is_written_cannot_break_the_markup() {
        assert!(chart(Vec::new()).svg().contains(">a&lt;b&gt;&amp;c<"));
    }

    #[test]
    fn points_lie_within_the_frame_whatever_their_values() {
        let points = vec![(-5.0, 0.5), (3.0, 7.0), (20.0, -1.0)];
        let line = Line {
            name: "one".to_owned(),
            stroke: Stroke::Solid,
            marked: false,
            points,
        };
        let text = chart(vec![line]).svg();
        let points = text
            .split("points=\"")
            .nth(1)
            .and_then(|rest| rest.split('"').next());
        let points: Vec<&str> = points.unwrap().split_whitespace().collect();
        assert_eq!(points.len(), 3);
        for point in points {
            let (x, y) = point.split_once(',').unwrap();
            let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
            assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{point}");
            assert!((TOP..=HEIGHT - BOTTOM).contains(&y), "{point}");
        }
    }

    #[test]
    fn decades_hold_all_values_and_label_each_power() {
        let axis = Axis::decades([3.0, 450.0].into_iter(), "x", |at| format!("{at}"));
        let labels: Vec<&str> = axis.ticks.iter().map(|tick| tick.label.as_str()).collect();
        assert_eq!(labels, ["1", "10", "100", "1000"]);
        assert_eq!((axis.share(1.0), axis.share(1000.0)), (0.0, 1.0));
        // Without values it is an axis all the same.
        assert!(
            Axis::decades(std::iter::empty(), "x", |_| String::new())
                .ticks
                .len()
                > 1
        );
    }
}
