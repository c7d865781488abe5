//! Writes the bench workloads as files, to compare them with other implementations:
//! `workloads DIR [TRACE]` writes `w1_fleet.bin`, `w3_*.bin` and, from the Mooncake rows of TRACE,
//! `w2_trace.bin`; `workloads --mooncake TOKENS` prints the fleet as Mooncake rows with blocks of
//! that many tokens, for `rootstock replay`. A seed other than 1 may follow, then `extended` for
//! the fleet with pauses, abandoned programs and thinking, and `lies` to make 30 % of the notes
//! wrong.
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
        [flag, tokens, rest @ ..] if flag == "--mooncake" => print_rows(tokens, rest),
        [folder] => write_all(Path::new(folder), None),
        [folder, trace] => write_all(Path::new(folder), Some(trace)),
        _ => Err(io::Error::other(
            "usage: workloads DIR [TRACE] | workloads --mooncake TOKENS [SEED [extended] [lies]]",
        )),
    }
}

fn print_rows(tokens: &str, rest: &[String]) -> io::Result<()> {
    let tokens = tokens.parse().map_err(io::Error::other)?;
    let seed = rest.first().map_or(Ok(1), |seed| seed.parse());
    let seed = seed.map_err(io::Error::other)?;
    let has = |word: &str| rest.iter().any(|one| one == word);
    let mut fleet = if has("extended") {
        Fleet::extended(seed)
    } else {
        Fleet::new(seed)
    };
    if has("lies") {
        fleet.lie(0.3, seed);
    }
    let mut out = BufWriter::new(io::stdout().lock());
    fleet.write_mooncake(tokens, &mut out)?;
    out.flush()
}

fn write_all(folder: &Path, rows: Option<&String>) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    write(folder, "w1_fleet", &Fleet::new(1).workload)?;
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
