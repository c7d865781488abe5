//! Writes the bench workloads as files, to compare them with other implementations:
//! `workloads DIR [TRACE]` writes `w1_fleet.bin`, `w3_*.bin` and, from the Mooncake rows of TRACE,
//! `w2_trace.bin`; `workloads --mooncake TOKENS` prints the fleet as Mooncake rows with blocks of
//! that many tokens, for `rootstock replay`.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::path::Path;

use rootstock_benches::fleet::Fleet;
use rootstock_benches::trace;
use rootstock_benches::workload::{Shape, Workload};

fn main() -> io::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.as_slice() {
        [flag, tokens] if flag == "--mooncake" => {
            let tokens = tokens.parse().map_err(io::Error::other)?;
            let mut out = BufWriter::new(io::stdout().lock());
            Fleet::new().write_mooncake(tokens, &mut out)?;
            out.flush()
        }
        [folder] => write_all(Path::new(folder), None),
        [folder, trace] => write_all(Path::new(folder), Some(trace)),
        _ => Err(io::Error::other(
            "usage: workloads DIR [TRACE] | workloads --mooncake TOKENS",
        )),
    }
}

fn write_all(folder: &Path, rows: Option<&String>) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    write(folder, "w1_fleet", &Fleet::new().workload)?;
    for shape in Shape::ALL {
        write(folder, &format!("w3_{}", shape.name()), &shape.workload())?;
    }
    match rows {
        Some(path) => write(
            folder,
            "w2_trace",
            &trace::workload(BufReader::new(File::open(path)?))?,
        ),
        None => Ok(()),
    }
}

fn write(folder: &Path, name: &str, workload: &Workload) -> io::Result<()> {
    let mut out = BufWriter::new(File::create(folder.join(format!("{name}.bin")))?);
    workload.write(&mut out)?;
    out.flush()
}
