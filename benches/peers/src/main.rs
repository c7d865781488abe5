//! Other projects' prefix caches and ours on the same inputs in the same run. Figures go to
//! standard output as lines of JSON; `rootstock bench report` makes tables of them.
//!
//! `peers micro PAGE_TOKENS LEAVES..`, `peers requests [TRACE]`, where TRACE holds Mooncake rows,
//! `peers workloads DIR` for peers in other languages; with the feature `bytes`, which counts what
//! is allocated, `peers bytes PAGE_TOKENS LEAVES..`. Times are processor time of the thread. A peer
//! is a released package, pinned in `Cargo.toml`.

#[cfg(feature = "bytes")]
mod bytes;
mod dynamo_router;
mod dynamo_sim;
mod micro;
mod ours;
mod peer;
mod record;
mod requests;

/// Dynamo's simulated cache; what of it we do not call is still there.
#[expect(
    dead_code,
    clippy::all,
    reason = "another project's source as released"
)]
mod engine {
    include!(concat!(env!("OUT_DIR"), "/engine.rs"));
}

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::path::Path;

use rootstock_benches::fleet::Fleet;
use rootstock_benches::trace;
use rootstock_benches::workload::{Shape, Workload};

use dynamo_router::DynamoRouter;
use dynamo_sim::DynamoSim;
use micro::Micro;
use ours::Ours;
use requests::{Case, Runs};

const USAGE: &str = "usage: peers micro PAGE_TOKENS LEAVES.. | peers requests [TRACE]";

/// Tokens of the cache for the shapes, the fleet and the trace.
const SHAPES: u32 = 2 << 20;
const FLEET: u32 = 1 << 20;
const TRACE: u32 = 4 << 20;

fn main() -> io::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["micro", page_tokens, leaves @ ..] if !leaves.is_empty() => {
            let page_tokens = page_tokens.parse().map_err(io::Error::other)?;
            for leaves in leaves {
                let leaves = leaves.parse().map_err(io::Error::other)?;
                micro::run(vec![
                    Micro::<Ours<0>>::boxed(page_tokens, leaves),
                    Micro::<Ours<1>>::boxed(page_tokens, leaves),
                    Micro::<DynamoSim>::boxed(page_tokens, leaves),
                    Micro::<DynamoRouter>::boxed(page_tokens, leaves),
                ])?;
            }
            Ok(())
        }
        #[cfg(feature = "bytes")]
        ["bytes", page_tokens, leaves @ ..] if !leaves.is_empty() => {
            let page_tokens = page_tokens.parse().map_err(io::Error::other)?;
            for leaves in leaves {
                let leaves = leaves.parse().map_err(io::Error::other)?;
                bytes::run::<Ours<0>>(page_tokens, leaves)?;
                bytes::run::<Ours<1>>(page_tokens, leaves)?;
                bytes::run::<DynamoSim>(page_tokens, leaves)?;
                bytes::run::<DynamoRouter>(page_tokens, leaves)?;
            }
            Ok(())
        }
        ["workloads", folder] => write_workloads(Path::new(folder)),
        ["requests"] => run_requests(None),
        ["requests", trace] => run_requests(Some(trace)),
        _ => Err(io::Error::other(USAGE)),
    }
}

/// The fleet and the shapes as files, for peers in other languages.
fn write_workloads(folder: &Path) -> io::Result<()> {
    let write = |name: &str, workload: &Workload| {
        let mut out = BufWriter::new(File::create(folder.join(name))?);
        workload.write(&mut out)?;
        out.flush()
    };
    write("w1_fleet.bin", &Fleet::new(1).workload)?;
    let mut shapes = Shape::ALL.into_iter();
    shapes.try_for_each(|shape| write(&format!("w3_{}.bin", shape.name()), &shape.workload()))
}

fn run_requests(rows: Option<&str>) -> io::Result<()> {
    run("W1 fleet", &Fleet::new(1).workload, FLEET, 5)?;
    for shape in Shape::ALL {
        run(
            &format!("W3 {}", shape.name()),
            &shape.workload(),
            SHAPES,
            5,
        )?;
    }
    match rows {
        Some(path) => {
            let workload = trace::workload(BufReader::new(File::open(path)?))?;
            run("W2 conversation", &workload, TRACE, 3)
        }
        None => Ok(()),
    }
}

fn run(name: &str, workload: &Workload, capacity_tokens: u32, runs: usize) -> io::Result<()> {
    let case = Case {
        name,
        workload,
        page_tokens: 16,
        capacity_tokens,
        runs,
    };
    let peers = vec![
        Runs::of::<Ours<0>>(),
        Runs::of::<Ours<1>>(),
        Runs::of::<DynamoSim>(),
        Runs::of::<DynamoRouter>(),
    ];
    requests::run(&case, peers)
}
