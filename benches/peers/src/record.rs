//! One measured figure as a line of JSON, as `rootstock bench report` reads it.

use std::io::{self, Write};

use serde::Serialize;

use crate::peer::{Kind, Peer};

/// A figure.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Record {
    peer: &'static str,
    kind: Kind,
    op: String,
    page_tokens: u32,
    /// Leaves of the tree, or 0 where requests of a workload were run.
    leaves: u32,
    unit: &'static str,
    median: f64,
    low: f64,
    high: f64,
    /// Part of the prompt tokens that was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hit_ratio: Option<f64>,
}

impl Record {
    /// The median and the range of what was measured; `None` where nothing was.
    pub(crate) fn of<P: Peer>(op: &str, unit: &'static str, values: &mut [f64]) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        Some(Self {
            peer: P::NAME,
            kind: P::KIND,
            op: op.to_owned(),
            page_tokens: 0,
            leaves: 0,
            unit,
            median: *values.get(values.len() / 2)?,
            low: *values.first()?,
            high: *values.last()?,
            hit_ratio: None,
        })
    }

    /// Where it was measured.
    pub(crate) const fn at(mut self, page_tokens: u32, leaves: u32) -> Self {
        (self.page_tokens, self.leaves) = (page_tokens, leaves);
        self
    }

    /// Writes it as a line.
    pub(crate) fn print(&self) -> io::Result<()> {
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, self)?;
        out.write_all(b"\n")?;
        out.flush()
    }
}
