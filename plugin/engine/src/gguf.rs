//! GGUF model files: metadata and tensors, by memory map, with every header field checked.
//!
//! [`Gguf::open`] walks the header once and refuses whatever does not add up: unknown versions,
//! counts above their limits, truncated files, tensors that overlap, leave the file, or have rows
//! that are not whole quantization blocks. After that, reading a tensor is a slice of the map. No
//! bytes, however broken, make it panic or allocate more than a small multiple of the header.
//!
//! It knows nothing about models: which keys and tensors are wanted is the reader's business, and
//! the accessors answer with the name of what is missing or wrong.
//!
//! Source of the format: the GGUF specification of ggml, versions 2 and 3, little-endian.

mod error;
mod parse;
mod tensor_type;
mod value;
mod write;

use std::collections::BTreeMap;
use std::path::Path;

pub use error::GgufError;
pub use tensor_type::TensorType;
pub use value::{TextList, Value};
pub use write::GgufWriter;

use crate::mmap::FileBytes;

/// An open model file.
#[derive(Debug)]
pub struct Gguf {
    bytes: FileBytes,
    version: u32,
    values: BTreeMap<String, Value>,
    tensors: Vec<TensorInfo>,
    by_name: BTreeMap<String, usize>,
}

/// What the header says about one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    name: String,
    ty: TensorType,
    shape: Vec<u64>,
    offset: u64,
    bytes: u64,
}

impl TensorInfo {
    /// Its name, such as `blk.0.attn_q.weight`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How its elements are stored.
    #[must_use]
    pub fn ty(&self) -> TensorType {
        self.ty
    }

    /// Its dimensions, innermost first: `[row length, rows, ..]`, 1 to 4 numbers, none zero.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Values in a row: the innermost dimension.
    #[must_use]
    pub fn row_values(&self) -> u64 {
        self.shape.first().copied().unwrap_or(0)
    }

    /// Number of rows: the product of the other dimensions.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.shape.iter().skip(1).product()
    }

    /// Size in bytes, as stored.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// One tensor with its bytes.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// What the header says.
    pub info: &'a TensorInfo,
    /// The stored bytes, `info.bytes()` long. Aligned to the file's alignment (32 by default) from
    /// the start of the file.
    pub data: &'a [u8],
}

impl Gguf {
    /// Maps and checks a file.
    ///
    /// The file must not be shortened or rewritten in place while the value lives: readers would
    /// see changed weights, or the process would be stopped by SIGBUS. Replacing it by a rename is
    /// safe.
    ///
    /// # Errors
    /// [`GgufError`] names what is wrong with which key or tensor.
    ///
    /// # Cost
    /// Linear in the header (some milliseconds for a vocabulary of 50,000); weights are not read.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let bytes = FileBytes::open(path).map_err(|source| GgufError::Open {
            path: path.to_owned(),
            source,
        })?;
        Self::from_file_bytes(bytes)
    }

    /// Checks a file that is in memory.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, GgufError> {
        Self::from_file_bytes(FileBytes::Owned(bytes))
    }

    fn from_file_bytes(bytes: FileBytes) -> Result<Self, GgufError> {
        let parse::Header {
            version,
            values,
            tensors,
        } = parse::header(&bytes)?;
        let by_name = tensors
            .iter()
            .enumerate()
            .map(|(index, info)| (info.name.clone(), index))
            .collect();
        Ok(Self {
            bytes,
            version,
            values: values.into_iter().collect(),
            tensors,
            by_name,
        })
    }

    /// Version of the file format, 2 or 3.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Size of the whole file in bytes.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// All tensors in the order of the file.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// A tensor by name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let info = self.tensors.get(*self.by_name.get(name)?)?;
        let start = usize::try_from(info.offset).ok()?;
        let end = start.checked_add(usize::try_from(info.bytes).ok()?)?;
        Some(TensorView {
            info,
            data: self.bytes.get(start..end)?,
        })
    }

    /// All metadata in order of the keys.
    pub fn values(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// A metadata value of any kind.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// Text, or None where the key is absent.
    ///
    /// # Errors
    /// The value is of another kind. (The same holds for the other accessors.)
    pub fn text_opt(&self, key: &str) -> Result<Option<&str>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(kind(key, other, "text")),
        }
    }

    /// Text that must be there.
    ///
    /// # Errors
    /// The key is absent or of another kind.
    pub fn text(&self, key: &str) -> Result<&str, GgufError> {
        self.text_opt(key)?.ok_or_else(|| missing(key))
    }

    /// A count or id, or None where the key is absent.
    ///
    /// # Errors
    /// The value is of another kind, negative, or does not fit 32 bits.
    pub fn u32_opt(&self, key: &str) -> Result<Option<u32>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Int(found)) => u32::try_from(*found).map(Some).map_err(|_| {
                let (min, max) = (0, u32::MAX.into());
                GgufError::Range {
                    key: key.to_owned(),
                    found: *found,
                    min,
                    max,
                }
            }),
            Some(other) => Err(kind(key, other, "integer")),
        }
    }

    /// A count or id that must be there.
    ///
    /// # Errors
    /// The key is absent, of another kind, negative, or does not fit 32 bits.
    pub fn u32(&self, key: &str) -> Result<u32, GgufError> {
        self.u32_opt(key)?.ok_or_else(|| missing(key))
    }

    /// A float (integers are taken too), or None where the key is absent.
    ///
    /// # Errors
    /// The value is of another kind.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "documented: narrowed to 32 bits, as the models compute"
    )]
    pub fn f32_opt(&self, key: &str) -> Result<Option<f32>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Float(value)) => Ok(Some(*value as f32)),
            Some(Value::Int(value)) => Ok(Some(*value as f32)),
            Some(other) => Err(kind(key, other, "float")),
        }
    }

    /// A float that must be there.
    ///
    /// # Errors
    /// The key is absent or of another kind.
    pub fn f32(&self, key: &str) -> Result<f32, GgufError> {
        self.f32_opt(key)?.ok_or_else(|| missing(key))
    }

    /// A truth value, or None where the key is absent.
    ///
    /// # Errors
    /// The value is of another kind.
    pub fn bool_opt(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(kind(key, other, "bool")),
        }
    }

    /// An array of texts, or None where the key is absent.
    ///
    /// # Errors
    /// The value is of another kind.
    pub fn texts_opt(&self, key: &str) -> Result<Option<&TextList>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Texts(texts)) => Ok(Some(texts)),
            Some(other) => Err(kind(key, other, "array of texts")),
        }
    }

    /// An array of integers, or None where the key is absent.
    ///
    /// # Errors
    /// The value is of another kind.
    pub fn ints_opt(&self, key: &str) -> Result<Option<&[i64]>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Ints(ints)) => Ok(Some(ints)),
            Some(other) => Err(kind(key, other, "array of integers")),
        }
    }

    /// An array of floats, or None where the key is absent.
    ///
    /// # Errors
    /// The value is of another kind.
    pub fn floats_opt(&self, key: &str) -> Result<Option<&[f32]>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Floats(floats)) => Ok(Some(floats)),
            Some(other) => Err(kind(key, other, "array of floats")),
        }
    }
}

fn missing(key: &str) -> GgufError {
    GgufError::Missing {
        key: key.to_owned(),
    }
}

fn kind(key: &str, value: &Value, wanted: &'static str) -> GgufError {
    GgufError::Kind {
        key: key.to_owned(),
        found: value.kind(),
        wanted,
    }
}
