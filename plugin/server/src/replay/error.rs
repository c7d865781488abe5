//! What can be wrong with a trace or with the options of a replay.

use std::path::PathBuf;

use rootstock::radix::CacheError;

/// A replay that cannot be done. Lines are counted from 1.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The trace, or a file to be written, cannot be opened, read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The journal with the step times.
    #[error("journal {}: {source}", path.display())]
    Journal {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rootstock::journal::JournalError,
    },
    /// A journal of a run that was too short.
    #[error(
        "journal {}: {steps} steps with a time, too few for a model; record a longer run",
        path.display()
    )]
    FewSteps {
        /// The file.
        path: PathBuf,
        /// Its steps.
        steps: usize,
    },
    /// A storage tier without a host tier, through which its pages come up.
    #[error(
        "--storage-capacity {tokens} needs --host-capacity: what is read from storage comes to \
         host first"
    )]
    StorageAlone {
        /// What was asked for.
        tokens: u64,
    },
    /// Sizes of two tiers that both differ from column to column.
    #[error(
        "--capacity, --host-capacity and --storage-capacity: one of them may be several sizes, and \
         --capacity must be one size where another is several"
    )]
    SweepOfTwo,
    /// A tier beyond what a cache may have.
    #[error("{flag} {tokens}: at most {limit} tokens")]
    LowerCapacity {
        /// The flag.
        flag: &'static str,
        /// What was asked for.
        tokens: u64,
        /// The limit.
        limit: u64,
    },
    /// The trace breaks off or is damaged.
    #[error("line {line}: cannot be read: {source}")]
    Read {
        /// The line that could not be finished.
        line: u64,
        /// Why.
        source: std::io::Error,
    },
    /// A line beyond the limit.
    #[error("line {line}: longer than {limit_bytes} bytes")]
    LongLine {
        /// Which line.
        line: u64,
        /// The limit.
        limit_bytes: usize,
    },
    /// Not JSON.
    #[error("line {line}: not JSON: {source}")]
    NotJson {
        /// Which line.
        line: u64,
        /// Where in the line, and why.
        source: serde_json::Error,
    },
    /// JSON, but not a row of a known form.
    #[error(
        "line {line}: neither a Mooncake row (a field hash_ids) nor an event of a request trace \
         (a field event)"
    )]
    UnknownForm {
        /// Which line.
        line: u64,
    },
    /// A field is absent or has another type.
    #[error("line {line}: field {field} is {found}, expected {wanted}")]
    Field {
        /// Which line.
        line: u64,
        /// Path of the field, dots between names.
        field: &'static str,
        /// What stands there, shortened.
        found: String,
        /// What should.
        wanted: &'static str,
    },
    /// Blocks of two sizes in one file.
    #[error("line {line}: blocks of {found} tokens, but those before have {before}")]
    MixedBlocks {
        /// Which line.
        line: u64,
        /// Its block size.
        found: u32,
        /// The block size so far.
        before: u32,
    },
    /// No request in the whole file.
    #[error("the trace has no requests")]
    Empty,
    /// More blocks than the replay can number.
    #[error("line {line}: more than {limit} blocks in the trace; cut it into pieces")]
    TooManyBlocks {
        /// The line with the block too many.
        line: u64,
        /// The limit.
        limit: u32,
    },
    /// `--page-size` contradicts the file.
    #[error("--page-size {asked}: the trace itself says its blocks have {stated} tokens")]
    PageSize {
        /// The option.
        asked: u32,
        /// What the file says.
        stated: u32,
    },
    /// The rows do not tell how many tokens a hash id stands for.
    #[error(
        "how many tokens a hash id stands for cannot be told from the rows: say it with --page-size"
    )]
    PageSizeUnknown,
    /// A capacity that holds no block, or more than the replay can number.
    #[error("--capacity {tokens}: must be between {page_tokens} (one block) and {limit} tokens")]
    Capacity {
        /// The option.
        tokens: u64,
        /// Tokens of a block.
        page_tokens: u32,
        /// The largest capacity.
        limit: u64,
    },
    /// The cache refused its configuration.
    #[error("the cache cannot be built: {0}")]
    Cache(#[from] CacheError),
    /// A fault of our own: the cache did something that the replay can prove wrong.
    #[error("request {request}: the cache broke its contract: {what}")]
    Broken {
        /// Which request, counted from 0.
        request: usize,
        /// What it did.
        what: &'static str,
    },
    /// The report cannot be made into JSON.
    #[error("cannot write the report as JSON: {0}")]
    Json(serde_json::Error),
    /// A replay thread ended in a panic.
    #[error("a replay thread panicked; please report this")]
    Thread,
}
