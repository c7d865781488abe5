//! What can be wrong with a GGUF file. Each message names the value found and what was wanted.

use std::path::PathBuf;

use super::TensorType;

/// Why a GGUF file was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are named by the messages")]
pub enum GgufError {
    /// The operating system could not open or map the file.
    #[error("cannot open the model file {}", path.display())]
    Open {
        path: PathBuf,
        source: std::io::Error,
    },
    /// The first four bytes are not the magic.
    #[error(
        "not a GGUF file: it begins with the bytes {found:02x?}, wanted 47 47 55 46 (\"GGUF\")"
    )]
    Magic { found: Vec<u8> },
    /// The file is written in big-endian order.
    #[error("big-endian GGUF files are not supported; convert the file to little-endian")]
    BigEndian,
    /// An unknown version of the format.
    #[error("GGUF version {found} is not supported; supported are 2 and 3")]
    Version { found: u32 },
    /// The file ends inside something.
    #[error(
        "the file is truncated: {what} at byte {offset} needs {needed} bytes, {left} are left; \
         download it again"
    )]
    Truncated {
        what: &'static str,
        offset: u64,
        needed: u64,
        left: u64,
    },
    /// A count or length above its limit.
    #[error("{what} is {found}, the limit is {limit}")]
    TooMany {
        what: &'static str,
        found: u64,
        limit: u64,
    },
    /// Text that is not UTF-8.
    #[error("{what} at byte {offset} is not UTF-8")]
    NotUtf8 { what: &'static str, offset: u64 },
    /// A key or a tensor name that occurs twice.
    #[error("{what} `{name}` occurs twice")]
    Duplicate { what: &'static str, name: String },
    /// A metadata value of an unknown type.
    #[error("metadata `{key}` has the unknown value type {id}; known are 0 to 12")]
    ValueType { key: String, id: u32 },
    /// A metadata array inside an array.
    #[error("metadata `{key}` is an array of arrays, which is not supported")]
    Nested { key: String },
    /// A truth value that is neither 0 nor 1.
    #[error("metadata `{key}` is a bool with the value {found}; allowed are 0 and 1")]
    BadBool { key: String, found: u8 },
    /// The file is one part of several.
    #[error("the model is split into {count} files; join them first (`llama-gguf-split --merge`)")]
    Split { count: i128 },
    /// The alignment is not a power of two in range.
    #[error("`general.alignment` is {found}; it must be a power of two from 1 to {limit}")]
    Alignment { found: i128, limit: u64 },
    /// A tensor of an unknown element type.
    #[error("tensor `{tensor}` has the unknown element type {id}")]
    ElementType { tensor: String, id: u32 },
    /// A tensor with no or too many dimensions.
    #[error("tensor `{tensor}` has {found} dimensions; allowed are 1 to 4")]
    Dimensions { tensor: String, found: u32 },
    /// A dimension of zero, or a size that does not fit 63 bits.
    #[error("tensor `{tensor}` has the shape {shape:?}, which is empty or too large")]
    Shape { tensor: String, shape: Vec<u64> },
    /// A row that is not whole blocks.
    #[error(
        "tensor `{tensor}` has rows of {row} values, not a multiple of the {} values \
         of a {ty} block",
        ty.block_values()
    )]
    RaggedRow {
        tensor: String,
        row: u64,
        ty: TensorType,
    },
    /// The data offset is not aligned.
    #[error("tensor `{tensor}` begins at {offset}, not a multiple of the alignment {alignment}")]
    Misaligned {
        tensor: String,
        offset: u64,
        alignment: u64,
    },
    /// The data lies beyond the end of the file.
    #[error(
        "tensor `{tensor}` of {bytes} bytes at data offset {offset} ends beyond the file, which \
         has {data_bytes} bytes of data; the file is truncated, download it again"
    )]
    OutsideFile {
        tensor: String,
        offset: u64,
        bytes: u64,
        data_bytes: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors `{first}` and `{second}` overlap at data offset {offset}")]
    Overlap {
        first: String,
        second: String,
        offset: u64,
    },
    /// A key that is needed and absent.
    #[error("metadata `{key}` is missing")]
    Missing { key: String },
    /// A value of another kind than wanted.
    #[error("metadata `{key}` is of kind {found}, wanted {wanted}")]
    Kind {
        key: String,
        found: &'static str,
        wanted: &'static str,
    },
    /// A number that does not fit its use.
    #[error("metadata `{key}` is {found}; allowed are {min} to {max}")]
    Range {
        key: String,
        found: i128,
        min: i128,
        max: i128,
    },
}
