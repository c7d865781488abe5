//! `rootstock bench kernels`: what the CUDA kernels reach on a device of this machine, as a table
//! in Markdown.

use std::io::Write;

use rootstock_engine::cuda_backend::code_cache;
use rootstock_engine::kernels::cuda::{CudaError, Device, Figure, MeasureSizes, Measured, measure};

/// Flags of `rootstock bench kernels`.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct KernelFlags {
    /// Number of the device
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub device: u32,
    /// Shapes of a toy, which measure nothing: to see that everything runs
    #[arg(long)]
    pub small: bool,
}

/// What stops a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelsError {
    /// No device, or it refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Standard output.
    #[error("cannot write the table: {0}")]
    Write(#[from] std::io::Error),
}

/// Measures the device and writes the table.
///
/// # Errors
/// No such device, too little memory on it, or the table cannot be written.
pub fn kernels(flags: &KernelFlags, out: &mut dyn Write) -> Result<(), KernelsError> {
    let device = Device::open(flags.device)?;
    let sizes = if flags.small {
        MeasureSizes::SMALL
    } else {
        MeasureSizes::CARD
    };
    let measured = measure(&device, &sizes, code_cache().as_deref())?;
    Ok(write_table(&measured, out)?)
}

fn write_table(measured: &Measured, out: &mut dyn Write) -> std::io::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    writeln!(out, "{}, rootstock {version}\n", measured.device)?;
    writeln!(out, "| kernel, shape | us | GB/s | of copy | TFLOP/s |")?;
    writeln!(out, "|---|---|---|---|---|")?;
    let copy = measured.copy.gigabytes_per_second();
    for figure in std::iter::once(&measured.copy).chain(&measured.figures) {
        writeln!(out, "{}", row(figure, copy))?;
    }
    let hidden = measured.overlap_percent;
    writeln!(
        out,
        "\nCopies to the host beside decode attention: {hidden} % of the shorter is hidden."
    )
}

#[expect(clippy::cast_precision_loss, reason = "times to show")]
fn row(figure: &Figure, copy: f64) -> String {
    let us = figure.ns as f64 / 1e3;
    let (rate, share) = match figure.bytes {
        0 => (String::new(), String::new()),
        _ => {
            let rate = figure.gigabytes_per_second();
            (
                format!("{rate:.0}"),
                format!("{:.0} %", 100.0 * rate / copy),
            )
        }
    };
    let operations = match figure.operations {
        0 => String::new(),
        _ => format!("{:.1}", figure.teraflops()),
    };
    format!(
        "| {} | {us:.1} | {rate} | {share} | {operations} |",
        figure.name
    )
}
