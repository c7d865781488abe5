//! `rootstock bench report`: figures that were recorded for several prefix caches, as a table and a
//! plot. A record is a line of JSON, as `benches/peers` prints them. Cells that are not won are
//! shown like the others, and listed.

use std::fmt::Write;
use std::path::PathBuf;

use serde::Deserialize;

use super::{BenchError, write_file};
use crate::chart::{Axis, Chart, Line, Stroke};

/// Peers of this name are ours: the plain cache, and with the agent policy.
const OURS: &str = "rootstock";
const OURS_AGENT: &str = "rootstock-agent";

/// Flags of `rootstock bench report`.
#[derive(Clone, Debug, clap::Args)]
pub struct ReportFlags {
    /// Recorded figures: lines of JSON
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Write times over the size of the tree as an SVG file, one for each operation, named after it
    #[arg(long, value_name = "FOLDER")]
    pub plots: Option<PathBuf>,
}

/// How much of a prompt's identity a cache looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Exact,
    Hashed,
    Index,
}

/// One recorded figure.
#[derive(Clone, Debug, Deserialize)]
struct Figure {
    peer: String,
    kind: Kind,
    op: String,
    page_tokens: u32,
    /// Leaves of the tree; 0 where requests of a workload were run.
    leaves: u32,
    unit: String,
    median: f64,
    #[serde(default)]
    hit_ratio: Option<f64>,
    /// Measured by somebody else, at another time.
    #[serde(default)]
    quoted: bool,
}

/// What is compared in one row: operation, unit, page.
type Row<'a> = (&'a str, &'a str, u32);

/// Reads the figures, writes the table to `out` and the plots to their folder.
///
/// # Errors
/// A file cannot be read or written, or a line is no record.
pub fn report(flags: &ReportFlags, out: &mut dyn std::io::Write) -> Result<(), BenchError> {
    let mut figures = Vec::new();
    for path in &flags.files {
        let failed = |source| BenchError::Read {
            path: path.clone(),
            source,
        };
        let text = std::fs::read_to_string(path).map_err(failed)?;
        for (line, row) in (1..).zip(text.lines()) {
            // Comments say how the figures came about.
            if row.trim().is_empty() || row.starts_with('#') {
                continue;
            }
            let figure = serde_json::from_str(row).map_err(|source| BenchError::Record {
                path: path.clone(),
                line,
                source,
            })?;
            figures.push(figure);
        }
    }
    if let Some(folder) = &flags.plots {
        for (name, svg) in plots(&figures) {
            write_file(&folder.join(name), &svg)?;
        }
    }
    out.write_all(table(&figures).as_bytes())
        .and_then(|()| out.flush())
        .map_err(|source| BenchError::File {
            path: PathBuf::from("standard output"),
            source,
        })
}

/// The rows in the order in which they first come.
fn rows(figures: &[Figure]) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = Vec::new();
    for figure in figures {
        let row = (figure.op.as_str(), figure.unit.as_str(), figure.page_tokens);
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    rows.sort_by_key(|row| row.2);
    rows
}

fn sizes(figures: &[Figure]) -> Vec<u32> {
    let mut sizes: Vec<u32> = figures.iter().map(|figure| figure.leaves).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// The figures of one row at one size.
struct Cell<'a>(Vec<&'a Figure>);

impl<'a> Cell<'a> {
    fn of(figures: &'a [Figure], row: Row<'_>, leaves: u32) -> Self {
        let same = figures.iter().filter(|figure| {
            (figure.op.as_str(), figure.unit.as_str(), figure.page_tokens) == row
                && figure.leaves == leaves
        });
        Self(same.collect())
    }

    fn named(&self, peer: &str) -> Option<&'a Figure> {
        let found = self.0.iter().find(|figure| figure.peer == peer);
        found.copied()
    }

    /// The best of those that ran beside ours.
    fn best(&self, is: impl Fn(&Figure) -> bool) -> Option<&'a Figure> {
        let others = self.0.iter().copied().filter(|figure| {
            !figure.quoted && figure.peer != OURS && figure.peer != OURS_AGENT && is(figure)
        });
        others.min_by(|one, other| one.median.total_cmp(&other.median))
    }

    /// Ours divided by the best of any kind: below 1 is won. The index holds no pages, so that what
    /// it does not do is not counted against anybody.
    fn ratio(&self) -> Option<f64> {
        let best = self.best(|_| true)?;
        Some(self.named(OURS)?.median / best.median)
    }

    /// `ours (agent) / exact / any / quoted`.
    fn text(&self) -> Option<String> {
        let ours = self.named(OURS)?;
        let show = |figure: Option<&Figure>| {
            figure.map_or_else(
                || "-".to_owned(),
                |figure| format!("{} {}", number(figure.median), figure.peer),
            )
        };
        let mut text = format!("**{}**", number(ours.median));
        if let Some(agent) = self.named(OURS_AGENT) {
            push(&mut text, format_args!(" ({})", number(agent.median)));
        }
        let quoted = self.0.iter().copied().find(|figure| figure.quoted);
        let exact = self.best(|figure| figure.kind == Kind::Exact);
        push(
            &mut text,
            format_args!(
                " / {} / {} / {}",
                show(exact),
                show(self.best(|_| true)),
                show(quoted)
            ),
        );
        if let Some(ratio) = self.ratio() {
            push(&mut text, format_args!(" x{ratio:.2}"));
        }
        Some(text)
    }
}

/// The tables: operations by size of the tree, then workloads.
fn table(figures: &[Figure]) -> String {
    let mut text = format!(
        "Cells: **ours** ({OURS_AGENT}) / fastest exact peer / fastest peer of any kind / quoted, \
         not of this run; then ours divided by the fastest of any kind.\n\n"
    );
    let sizes: Vec<u32> = sizes(figures)
        .into_iter()
        .filter(|size| *size > 0)
        .collect();
    let (mut cells, mut lost) = (0, Vec::new());
    if !sizes.is_empty() {
        let head = sizes
            .iter()
            .map(|size| format!(" {} leaves |", crate::chart::short((*size).into())));
        push(
            &mut text,
            format_args!(
                "| operation, page, unit |{}\n|---|{}\n",
                head.collect::<String>(),
                "---|".repeat(sizes.len())
            ),
        );
    }
    for row in rows(figures) {
        let of_row: Vec<Cell<'_>> = sizes
            .iter()
            .map(|&size| Cell::of(figures, row, size))
            .collect();
        if of_row.iter().all(|cell| cell.0.is_empty()) {
            continue;
        }
        push(
            &mut text,
            format_args!("| {}, {}, {} |", row.0, row.2, row.1),
        );
        for (cell, size) in of_row.iter().zip(&sizes) {
            push(
                &mut text,
                format_args!(" {} |", cell.text().unwrap_or_default()),
            );
            let Some(ratio) = cell.ratio() else { continue };
            cells += 1;
            if ratio > 1.0 {
                lost.push(format!(
                    "{} at {size} leaves, page {} (x{ratio:.2})",
                    row.0, row.2
                ));
            }
        }
        text.push('\n');
    }
    workloads(figures, &mut text, &mut cells, &mut lost);
    push(
        &mut text,
        format_args!("\n{} of {cells} cells won.", cells - lost.len()),
    );
    if !lost.is_empty() {
        push(&mut text, format_args!(" Not won: {}.", lost.join("; ")));
    }
    text + "\n"
}

/// A row for each workload and peer, with the part of the prompt tokens that was found.
fn workloads(figures: &[Figure], text: &mut String, cells: &mut usize, lost: &mut Vec<String>) {
    let of_workloads = |row: &Row<'_>| !Cell::of(figures, *row, 0).0.is_empty();
    let rows: Vec<Row<'_>> = rows(figures).into_iter().filter(of_workloads).collect();
    if rows.is_empty() {
        return;
    }
    text.push_str(
        "\n| workload | peer | kind | ns a request | hit ratio | ours / it |\n\
         |---|---|---|---|---|---|\n",
    );
    for row in rows {
        let cell = Cell::of(figures, row, 0);
        let ours = cell.named(OURS).map(|figure| figure.median);
        for figure in &cell.0 {
            let kind = format!("{:?}", figure.kind).to_lowercase();
            let quoted = if figure.quoted { ", quoted" } else { "" };
            let ratio =
                ours.map_or_else(String::new, |ours| format!("{:.2}", ours / figure.median));
            let hits = figure
                .hit_ratio
                .map_or_else(String::new, |hits| format!("{hits:.4}"));
            push(
                text,
                format_args!(
                    "| {} | {} | {kind}{quoted} | {} | {hits} | {ratio} |\n",
                    row.0,
                    figure.peer,
                    number(figure.median)
                ),
            );
        }
        if let Some(ratio) = cell.ratio() {
            *cells += 1;
            if ratio > 1.0 {
                lost.push(format!("{} (x{ratio:.2})", row.0));
            }
        }
    }
}

/// A plot of each operation that was measured at several sizes, and the name of its file.
fn plots(figures: &[Figure]) -> Vec<(String, String)> {
    let mut plots = Vec::new();
    for row in rows(figures) {
        let (op, unit, page_tokens) = row;
        let here: Vec<&Figure> = figures
            .iter()
            .filter(|figure| (figure.op.as_str(), figure.unit.as_str(), figure.page_tokens) == row)
            .filter(|figure| figure.leaves > 0)
            .collect();
        let mut names: Vec<&str> = here.iter().map(|figure| figure.peer.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let line = |name: &&str| {
            let own = here.iter().filter(|figure| figure.peer == **name);
            let mut points: Vec<(f64, f64)> = own
                .map(|figure| (f64::from(figure.leaves), figure.median))
                .collect();
            points.sort_by(|one, other| one.0.total_cmp(&other.0));
            let quoted = here
                .iter()
                .any(|figure| figure.peer == **name && figure.quoted);
            Line {
                name: (*name).to_owned(),
                stroke: if quoted {
                    Stroke::Dotted
                } else {
                    Stroke::Solid
                },
                marked: true,
                points,
            }
        };
        let lines: Vec<Line> = names.iter().map(line).collect();
        if lines.iter().all(|line| line.points.len() < 2) {
            continue;
        }
        let points = || lines.iter().flat_map(|line| line.points.iter().copied());
        let chart = Chart {
            title: format!("{op}, pages of {page_tokens} tokens, {unit}"),
            x: Axis::decades(points().map(|point| point.0), "leaves of the tree", number),
            y: Axis::decades(points().map(|point| point.1), "", number),
            lines,
        };
        let file: String = op
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .collect();
        plots.push((format!("{file}-{page_tokens}.svg"), chart.svg()));
    }
    plots
}

/// Three digits are enough for what is noisy in the second.
fn number(value: f64) -> String {
    let (value, unit) = match value.abs() {
        large if large >= 1e9 => (value / 1e9, "G"),
        large if large >= 1e6 => (value / 1e6, "M"),
        large if large >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}{unit}"),
        large if large >= 10.0 => format!("{value:.1}{unit}"),
        _ => format!("{value:.2}{unit}"),
    }
}

fn push(text: &mut String, args: std::fmt::Arguments<'_>) {
    // Writing to a string does not fail.
    text.write_fmt(args).unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(peer: &str, kind: Kind, leaves: u32, median: f64) -> Figure {
        Figure {
            peer: peer.to_owned(),
            kind,
            op: "evict".to_owned(),
            page_tokens: 16,
            leaves,
            unit: "ns".to_owned(),
            median,
            hit_ratio: None,
            quoted: false,
        }
    }

    #[test]
    fn a_cell_names_the_best_of_each_kind_and_what_is_lost_is_listed() {
        let mut quoted = figure("tgi", Kind::Exact, 1000, 1.0);
        quoted.quoted = true;
        let figures = [
            figure(OURS, Kind::Exact, 1000, 50.0),
            figure("slow", Kind::Exact, 1000, 20_000.0),
            figure("hashed", Kind::Hashed, 1000, 100.0),
            quoted,
            figure(OURS, Kind::Exact, 10_000, 60.0),
            figure("hashed", Kind::Hashed, 10_000, 40.0),
        ];
        let text = table(&figures);
        let cell = "| **50.0** / 20.0k slow / 100 hashed / 1.00 tgi x0.50 |";
        assert!(text.contains(cell), "{text}");
        assert!(
            text.contains("1 of 2 cells won. Not won: evict at 10000 leaves"),
            "{text}"
        );
    }

    #[test]
    fn workloads_are_told_peer_by_peer() {
        let mut ours = figure(OURS, Kind::Exact, 0, 1500.0);
        ours.hit_ratio = Some(0.8105);
        let text = table(&[ours, figure("index", Kind::Index, 0, 3000.0)]);
        assert!(
            text.contains("| evict | rootstock | exact | 1500 | 0.8105 | 1.00 |"),
            "{text}"
        );
        assert!(
            text.contains("| evict | index | index | 3000 |  | 0.50 |"),
            "{text}"
        );
        assert!(text.contains("1 of 1 cells won."), "{text}");
    }

    #[test]
    fn an_operation_at_several_sizes_is_plotted() {
        let figures = [
            figure(OURS, Kind::Exact, 1000, 50.0),
            figure(OURS, Kind::Exact, 10_000, 60.0),
        ];
        let plots = plots(&figures);
        assert_eq!(plots.len(), 1);
        assert_eq!(plots[0].0, "evict-16.svg");
        assert_eq!(plots[0].1.matches("<polyline").count(), 1);
    }

    #[test]
    fn a_line_that_is_no_record_is_named() {
        let path = std::env::temp_dir().join(format!("rootstock-record-{}", std::process::id()));
        std::fs::write(&path, "# a comment\n{\"peer\": 1}\n").unwrap();
        let flags = ReportFlags {
            files: vec![path.clone()],
            plots: None,
        };
        let error = report(&flags, &mut Vec::new()).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(error.contains("line 2"), "{error}");
    }
}
