//! A small GGUF writer, for tests: tiny random models and deliberately wrong files.
//!
//! It writes version 3, little-endian, and pads between tensors; it does not check what it is
//! given, so that a test can write what [`Gguf`](super::Gguf) must refuse.

use std::io;
use std::path::Path;

use super::{TensorType, Value};

const ALIGNMENT: usize = 32;

/// Collects metadata and tensors, then writes them in the order they came.
#[derive(Debug, Default)]
pub struct GgufWriter {
    values: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
}

#[derive(Debug)]
struct Tensor {
    name: String,
    shape: Vec<u64>,
    ty: TensorType,
    data: Vec<u8>,
}

impl GgufWriter {
    /// An empty file.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a metadata value. Integers are written as `u32` where they fit, else as 64 bits;
    /// integer arrays as `i32` where all fit; floats as `f32`.
    #[must_use]
    pub fn value(mut self, key: &str, value: Value) -> Self {
        self.values.push((key.to_owned(), value));
        self
    }

    /// Adds an integer.
    #[must_use]
    pub fn int(self, key: &str, value: impl Into<i128>) -> Self {
        self.value(key, Value::Int(value.into()))
    }

    /// Adds a float.
    #[must_use]
    pub fn float(self, key: &str, value: f64) -> Self {
        self.value(key, Value::Float(value))
    }

    /// Adds a text.
    #[must_use]
    pub fn text(self, key: &str, value: &str) -> Self {
        self.value(key, Value::Text(value.to_owned()))
    }

    /// Adds an array of texts.
    #[must_use]
    pub fn texts<S: AsRef<str>>(self, key: &str, texts: impl IntoIterator<Item = S>) -> Self {
        self.value(key, Value::Texts(texts.into_iter().collect()))
    }

    /// Adds a tensor; `shape` is innermost first (the first number is the length of a row), and
    /// `data` its bytes as they stand in the file.
    #[must_use]
    pub fn tensor(mut self, name: &str, shape: &[u64], ty: TensorType, data: Vec<u8>) -> Self {
        self.tensors.push(Tensor {
            name: name.to_owned(),
            shape: shape.to_vec(),
            ty,
            data,
        });
        self
    }

    /// Adds a tensor of 32-bit floats.
    #[must_use]
    pub fn tensor_f32(self, name: &str, shape: &[u64], values: &[f32]) -> Self {
        let data = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.tensor(name, shape, TensorType::F32, data)
    }

    /// The bytes of the file.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            put_text(&mut out, key);
            put_value(&mut out, value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            put_text(&mut out, &tensor.name);
            out.extend(
                u32::try_from(tensor.shape.len())
                    .unwrap_or(u32::MAX)
                    .to_le_bytes(),
            );
            for dim in &tensor.shape {
                out.extend(dim.to_le_bytes());
            }
            out.extend(tensor.ty.id().to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + tensor.data.len()).next_multiple_of(ALIGNMENT);
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        for tensor in &self.tensors {
            out.extend_from_slice(&tensor.data);
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        }
        out
    }

    /// Writes the file.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        std::fs::write(path, self.to_bytes())
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Int(number) => put_int(out, *number),
        Value::Float(number) => {
            out.extend(6_u32.to_le_bytes());
            #[expect(
                clippy::cast_possible_truncation,
                reason = "documented: written as f32"
            )]
            out.extend((*number as f32).to_le_bytes());
        }
        Value::Bool(flag) => {
            out.extend(7_u32.to_le_bytes());
            out.push(u8::from(*flag));
        }
        Value::Text(text) => {
            out.extend(8_u32.to_le_bytes());
            put_text(out, text);
        }
        Value::Ints(numbers) => {
            let narrow: Option<Vec<i32>> = numbers.iter().map(|&n| i32::try_from(n).ok()).collect();
            match narrow {
                Some(narrow) => {
                    put_array_head(out, 5, narrow.len());
                    out.extend(narrow.iter().flat_map(|n| n.to_le_bytes()));
                }
                None => {
                    put_array_head(out, 11, numbers.len());
                    out.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
                }
            }
        }
        Value::Floats(numbers) => {
            put_array_head(out, 6, numbers.len());
            out.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
        }
        Value::Texts(texts) => {
            put_array_head(out, 8, texts.len());
            for text in texts.iter() {
                put_text(out, text);
            }
        }
    }
}

fn put_int(out: &mut Vec<u8>, number: i128) {
    if let Ok(small) = u32::try_from(number) {
        out.extend(4_u32.to_le_bytes());
        out.extend(small.to_le_bytes());
    } else if let Ok(large) = u64::try_from(number) {
        out.extend(10_u32.to_le_bytes());
        out.extend(large.to_le_bytes());
    } else {
        out.extend(11_u32.to_le_bytes());
        out.extend(i64::try_from(number).unwrap_or(i64::MIN).to_le_bytes());
    }
}

fn put_array_head(out: &mut Vec<u8>, type_id: u32, len: usize) {
    out.extend(9_u32.to_le_bytes());
    out.extend(type_id.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}
