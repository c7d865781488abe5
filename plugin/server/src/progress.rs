//! Progress of a start on the terminal: a bar while a model is fetched, a turning sign while it
//! is loaded. Where standard error is no terminal nothing is drawn.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use rootstock_engine::model_source::Progress;

const BYTES: &str = "{msg} [{bar:40}] {bytes} of {total_bytes} ({eta} left)";
const UNKNOWN: &str = "{spinner} {msg} {bytes}";
const TURNING: &str = "{spinner} {msg} {elapsed}";

/// One line that changes with what is going on.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    bar: ProgressBar,
    shown: Option<(&'static str, Option<u64>)>,
}

impl ProgressLine {
    /// A turning sign with a message.
    pub(crate) fn new(message: &'static str) -> ProgressLine {
        let bar = ProgressBar::new_spinner().with_message(message);
        set_style(&bar, TURNING);
        bar.enable_steady_tick(Duration::from_millis(100));
        ProgressLine { bar, shown: None }
    }

    /// Shows how far a model is fetched.
    pub(crate) fn show(&mut self, progress: Progress) {
        let (message, bytes, total) = match progress {
            Progress::Waiting => ("another process is fetching the model", 0, None),
            Progress::Downloading { bytes, total } => ("downloading the model", bytes, total),
            Progress::Unpacking { bytes, total } => ("unpacking the model", bytes, Some(total)),
            Progress::Verifying { bytes, total } => ("verifying the model", bytes, Some(total)),
        };
        if self.shown != Some((message, total)) {
            self.shown = Some((message, total));
            set_style(&self.bar, if total.is_some() { BYTES } else { UNKNOWN });
            self.bar.set_message(message);
            self.bar.set_length(total.unwrap_or(0));
        }
        self.bar.set_position(bytes);
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn set_style(bar: &ProgressBar, template: &str) {
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.set_style(style),
        // The default style tells as much, less nicely.
        Err(error) => tracing::debug!(%error, "bad progress template"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_templates_are_valid() {
        for template in [BYTES, UNKNOWN, TURNING] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }
}
