//! How long a step waits for the mask of a constrained answer: over the 200 schemas of the tests
//! and the default model's vocabulary, from a drawn token to the mask of the next one, as the
//! engine thread sees it when nothing hides it. It serves the decision whether masks have to be
//! worked out further ahead. Beside the time on the wall stands the CPU time of the thread that
//! works them out, so that other work on the machine does not count.
//!
//! ```text
//! cargo run --release -p rootstock-engine --example masks [MODEL.gguf]
//! ```

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rootstock::Masks as _;
use rootstock::scheduler::RequestId;
use rootstock_engine::constrained::{AnswerGrammar, GrammarMaker, GrammarMasks, Wanted};
use rootstock_engine::gguf::Gguf;
use rootstock_engine::model_source::{ModelSpec, resolve};
use rootstock_engine::tokenizer::Tokenizer;

#[path = "../tests/support/schemas.rs"]
#[expect(dead_code, reason = "shared with a test, which asks more of a schema")]
mod schemas;

use schemas::{Dice, schema};

const SCHEMAS: u64 = 200;
const TOKENS_MAX: u32 = 400;

fn main() -> Result<(), Box<dyn Error>> {
    let path = match std::env::args().nth(1) {
        Some(path) => PathBuf::from(path),
        None => resolve(&ModelSpec::Auto, &mut |_| {})?.path,
    };
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path)?)?;
    let maker = GrammarMaker::new(&tokenizer, tokenizer.vocabulary_len())?;
    let masks = GrammarMasks::start()?;
    // A first answer of one token: its thread has its name then.
    let warm = RequestId(u64::MAX);
    masks.begin(warm, &maker.compile(&Wanted::Regex("a".to_owned()))?);
    masks.allowed(warm, 0).ok_or("no mask")?;
    masks.end(warm);
    let cpu_time = CpuTime::of("rootstock-masks")?;
    let (mut compiled, mut first, mut later) = (Vec::new(), Vec::new(), Vec::new());
    let mut later_cpu = Vec::new();
    for number in 0..SCHEMAS {
        let wanted = Wanted::Answer(AnswerGrammar {
            json: Some(schema(number).schema),
            ..AnswerGrammar::default()
        });
        let begun = now();
        let grammar = maker.compile(&wanted)?;
        compiled.push(begun.elapsed());
        let request = RequestId(number);
        let begun = now();
        masks.begin(request, &grammar);
        let mut dice = Dice(number);
        let mut waited = (begun, cpu_time.now()?);
        for index in 0..TOKENS_MAX {
            let mask = masks.allowed(request, index).ok_or("no mask")?;
            let times = if index == 0 { &mut first } else { &mut later };
            times.push(waited.0.elapsed());
            if index > 0 {
                later_cpu.push(cpu_time.now()?.saturating_sub(waited.1));
            }
            let token = choose(&mask, &mut dice);
            if tokenizer.end_tokens().contains(&token) {
                break;
            }
            waited = (now(), cpu_time.now()?);
            masks.drawn(request, index, token);
        }
        masks.end(request);
    }
    let mut out = std::io::stdout();
    let all = [
        ("compile", compiled),
        ("first mask", first),
        ("mask", later),
        ("mask, CPU time", later_cpu),
    ];
    for (name, times) in all {
        tell(&mut out, name, times)?;
    }
    Ok(())
}

/// The CPU time of one thread of this process.
struct CpuTime(PathBuf);

impl CpuTime {
    fn of(name: &str) -> Result<CpuTime, Box<dyn Error>> {
        for task in std::fs::read_dir("/proc/self/task")? {
            let path = task?.path();
            if std::fs::read_to_string(path.join("comm"))?.trim() == name {
                return Ok(CpuTime(path.join("schedstat")));
            }
        }
        Err(format!("no thread {name}").into())
    }

    fn now(&self) -> Result<Duration, Box<dyn Error>> {
        let text = std::fs::read_to_string(&self.0)?;
        let ns = text.split_whitespace().next().ok_or("no CPU time")?;
        Ok(Duration::from_nanos(ns.parse()?))
    }
}

#[expect(clippy::disallowed_methods, reason = "a measurement reads the clock")]
fn now() -> Instant {
    Instant::now()
}

fn choose(mask: &[u32], dice: &mut Dice) -> u32 {
    let allowed = |token: u32| {
        mask.get(token as usize / 32)
            .is_some_and(|word| word >> (token % 32) & 1 == 1)
    };
    let tokens = u32::try_from(mask.len()).unwrap_or(0) * 32;
    let all: Vec<u32> = (0..tokens).filter(|token| allowed(*token)).collect();
    all.get(dice.roll(all.len())).copied().unwrap_or(0)
}

fn tell(out: &mut impl Write, name: &str, mut times: Vec<Duration>) -> std::io::Result<()> {
    times.sort();
    let at = |share: usize| {
        let time = times.get((times.len() * share / 1000).min(times.len().saturating_sub(1)));
        time.map_or(0.0, |time| time.as_secs_f64() * 1e3)
    };
    writeln!(
        out,
        "{name}: {} times, p50 {:.3} ms, p90 {:.3} ms, p99 {:.3} ms, p99.9 {:.3} ms, most {:.3} ms",
        times.len(),
        at(500),
        at(900),
        at(990),
        at(999),
        at(1000),
    )
}
