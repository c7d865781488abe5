//! The columns of the table: the sizes of a cache's tiers, of which one is swept.

use serde::Serialize;

use super::ReplayFlags;
use super::error::ReplayError;
use super::read::TraceFile;

/// Blocks of a tier, at most: as many as a trace may have.
const CAPACITY_BLOCKS_MAX: u32 = 1 << 28;

/// Columns of the table where `--capacity` is absent: these parts of the trace's distinct blocks.
const DEFAULT_PARTS: [u32; 6] = [32, 16, 8, 4, 2, 1];

/// The tier whose size differs from column to column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Swept {
    /// The device.
    Device,
    /// The host tier.
    Host,
    /// The storage tier.
    Storage,
}

/// The size of a tier: tokens as asked for, and whole blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size {
    pub(crate) tokens: u64,
    pub(crate) blocks: u32,
}

/// A cache: the sizes of its tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Column {
    pub(crate) device: Size,
    pub(crate) host: Size,
    pub(crate) storage: Size,
}

/// The columns that the flags ask for, ascending.
///
/// # Errors
/// A size is out of bounds, two tiers are swept at once, or storage has no host tier above it.
pub(crate) fn of(
    flags: &ReplayFlags,
    file: &TraceFile,
) -> Result<(Swept, Vec<Column>), ReplayError> {
    let host = lower("--host-capacity", &flags.host_capacity, file.page_tokens)?;
    let storage = lower(
        "--storage-capacity",
        &flags.storage_capacity,
        file.page_tokens,
    )?;
    let swept = match (host.len() > 1, storage.len() > 1) {
        (false, false) => Swept::Device,
        (true, false) => Swept::Host,
        (false, true) => Swept::Storage,
        (true, true) => return Err(ReplayError::SweepOfTwo),
    };
    if swept != Swept::Device && flags.capacity.len() != 1 {
        return Err(ReplayError::SweepOfTwo);
    }
    let alone = storage.iter().find(|size| size.blocks > 0);
    if let Some(size) = alone.filter(|_| host.iter().any(|size| size.blocks == 0)) {
        return Err(ReplayError::StorageAlone {
            tokens: size.tokens,
        });
    }
    let mut columns = Vec::new();
    for &device in &devices(&flags.capacity, file)? {
        for &host in &host {
            columns.extend(storage.iter().map(|&storage| Column {
                device,
                host,
                storage,
            }));
        }
    }
    Ok((swept, columns))
}

/// Sizes of the device.
fn devices(asked: &[u64], file: &TraceFile) -> Result<Vec<Size>, ReplayError> {
    let page_tokens = file.page_tokens;
    let mut tokens = asked.to_vec();
    if asked.is_empty() {
        let distinct = file.trace.distinct_blocks().max(1);
        let blocks = DEFAULT_PARTS.map(|part| distinct.div_ceil(part));
        tokens.extend(blocks.map(|count| u64::from(count) * u64::from(page_tokens)));
    }
    sizes(tokens, page_tokens, 1).map_err(|tokens| ReplayError::Capacity {
        tokens,
        page_tokens,
        limit: limit(page_tokens),
    })
}

/// Sizes of a tier below: one of nothing where none is asked for.
fn lower(flag: &'static str, asked: &[u64], page_tokens: u32) -> Result<Vec<Size>, ReplayError> {
    if asked.is_empty() {
        return Ok(vec![Size::default()]);
    }
    sizes(asked.to_vec(), page_tokens, 0).map_err(|tokens| ReplayError::LowerCapacity {
        flag,
        tokens,
        limit: limit(page_tokens),
    })
}

/// Tokens as sizes, ascending and each once, or the first that is out of bounds.
fn sizes(mut tokens: Vec<u64>, page_tokens: u32, min: u32) -> Result<Vec<Size>, u64> {
    tokens.sort_unstable();
    tokens.dedup();
    let checked = tokens.into_iter().map(|tokens| {
        let blocks = u32::try_from(tokens / u64::from(page_tokens)).unwrap_or(u32::MAX);
        let fits = (min..=CAPACITY_BLOCKS_MAX).contains(&blocks);
        fits.then_some(Size { tokens, blocks }).ok_or(tokens)
    });
    checked.collect()
}

/// Tokens of a tier, at most.
const fn limit(page_tokens: u32) -> u64 {
    CAPACITY_BLOCKS_MAX as u64 * page_tokens as u64
}
