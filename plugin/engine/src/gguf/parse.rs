//! The checked walk over the header: counts, metadata, tensor table.
//!
//! Nothing is trusted: each read is bounds-checked against the file, each count against a limit,
//! and memory grows only with bytes that are really in the file, so a claimed count of 2^60 costs
//! nothing. The walk is linear in the bytes of the header.

use std::collections::BTreeSet;

use super::{GgufError, TensorInfo, TensorType, TextList, Value};

const KEYS_MAX: u64 = 1 << 16;
const KEY_BYTES_MAX: u64 = (1 << 16) - 1;
const TENSORS_MAX: u64 = 1 << 17;
const TENSOR_NAME_BYTES_MAX: u64 = 256;
const TEXT_BYTES_MAX: u64 = 1 << 26;
const ARRAY_VALUES_MAX: u64 = 1 << 24;
const ALIGNMENT_MAX: u64 = 1 << 20;
const ALIGNMENT_DEFAULT: u64 = 32;
const DIMENSIONS_MAX: u32 = 4;

const TYPE_TEXT: u32 = 8;
const TYPE_ARRAY: u32 = 9;

/// What the header says.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) values: Vec<(String, Value)>,
    pub(super) tensors: Vec<TensorInfo>,
}

/// Reads and checks the whole header.
pub(super) fn header(bytes: &[u8]) -> Result<Header, GgufError> {
    let mut reader = Reader { bytes, at: 0 };
    let magic = bytes.get(..4).unwrap_or(bytes);
    if magic != b"GGUF" {
        return Err(GgufError::Magic {
            found: magic.to_vec(),
        });
    }
    reader.at = 4;
    let version = reader.u32("the version")?;
    match version {
        2 | 3 => {}
        found if matches!(found.swap_bytes(), 1..=3) => return Err(GgufError::BigEndian),
        found => return Err(GgufError::Version { found }),
    }
    let tensor_count = reader.count("the number of tensors", TENSORS_MAX)?;
    let key_count = reader.count("the number of metadata keys", KEYS_MAX)?;

    let values = metadata(&mut reader, key_count)?;
    let alignment = alignment(&values)?;
    let mut tensors = tensor_table(&mut reader, tensor_count, alignment)?;
    place(&mut tensors, reader.at, alignment, bytes.len())?;
    Ok(Header {
        version,
        values,
        tensors,
    })
}

fn metadata(reader: &mut Reader<'_>, count: u64) -> Result<Vec<(String, Value)>, GgufError> {
    let mut values = Vec::new();
    let mut seen = BTreeSet::new();
    for _ in 0..count {
        let key = reader.text("a metadata key", KEY_BYTES_MAX)?;
        let type_id = reader.u32("a value type")?;
        let value = reader.value(key, type_id)?;
        if !seen.insert(key) {
            return Err(GgufError::Duplicate {
                what: "metadata key",
                name: key.to_owned(),
            });
        }
        values.push((key.to_owned(), value));
    }
    if let Some(count) = int(&values, "split.count")
        && count > 1
    {
        return Err(GgufError::Split { count });
    }
    Ok(values)
}

fn int(values: &[(String, Value)], key: &str) -> Option<i128> {
    let (_, value) = values.iter().find(|(name, _)| name == key)?;
    if let Value::Int(number) = value {
        Some(*number)
    } else {
        None
    }
}

fn alignment(values: &[(String, Value)]) -> Result<u64, GgufError> {
    let Some(found) = int(values, "general.alignment") else {
        return Ok(ALIGNMENT_DEFAULT);
    };
    match u64::try_from(found) {
        Ok(value) if value.is_power_of_two() && value <= ALIGNMENT_MAX => Ok(value),
        _ => Err(GgufError::Alignment {
            found,
            limit: ALIGNMENT_MAX,
        }),
    }
}

fn tensor_table(
    reader: &mut Reader<'_>,
    count: u64,
    alignment: u64,
) -> Result<Vec<TensorInfo>, GgufError> {
    let mut tensors = Vec::new();
    let mut seen = BTreeSet::new();
    for _ in 0..count {
        let name = reader.text("a tensor name", TENSOR_NAME_BYTES_MAX)?;
        if !seen.insert(name) {
            return Err(GgufError::Duplicate {
                what: "tensor",
                name: name.to_owned(),
            });
        }
        tensors.push(tensor(reader, name, alignment)?);
    }
    Ok(tensors)
}

fn tensor(reader: &mut Reader<'_>, name: &str, alignment: u64) -> Result<TensorInfo, GgufError> {
    let tensor = || name.to_owned();
    let found = reader.u32("a number of dimensions")?;
    if !(1..=DIMENSIONS_MAX).contains(&found) {
        return Err(GgufError::Dimensions {
            tensor: tensor(),
            found,
        });
    }
    let mut shape = Vec::new();
    for _ in 0..found {
        shape.push(reader.u64("a dimension")?);
    }
    let id = reader.u32("an element type")?;
    let ty = TensorType::from_id(id).ok_or_else(|| GgufError::ElementType {
        tensor: tensor(),
        id,
    })?;
    let offset = reader.u64("a tensor offset")?;

    let bytes = size_bytes(&shape, ty).ok_or_else(|| GgufError::Shape {
        tensor: tensor(),
        shape: shape.clone(),
    })?;
    let row = shape.first().copied().unwrap_or(0);
    if !row.is_multiple_of(ty.block_values()) {
        return Err(GgufError::RaggedRow {
            tensor: tensor(),
            row,
            ty,
        });
    }
    if !offset.is_multiple_of(alignment) {
        return Err(GgufError::Misaligned {
            tensor: tensor(),
            offset,
            alignment,
        });
    }
    Ok(TensorInfo {
        name: tensor(),
        ty,
        shape,
        offset,
        bytes,
    })
}

/// Bytes of a tensor, or None when it is empty or does not fit 63 bits.
fn size_bytes(shape: &[u64], ty: TensorType) -> Option<u64> {
    let values = shape
        .iter()
        .try_fold(1_u64, |total, &dim| total.checked_mul(dim))?;
    let bytes = (values / ty.block_values()).checked_mul(ty.block_bytes())?;
    (values > 0 && i64::try_from(values).is_ok() && i64::try_from(bytes).is_ok()).then_some(bytes)
}

/// Checks that all tensors lie inside the file, apart from each other, and turns their offsets
/// from the start of the data into offsets from the start of the file.
fn place(
    tensors: &mut [TensorInfo],
    header_bytes: usize,
    alignment: u64,
    file_bytes: usize,
) -> Result<(), GgufError> {
    let header_bytes = header_bytes as u64;
    let file_bytes = file_bytes as u64;
    let data_start = header_bytes.next_multiple_of(alignment);
    let data_bytes = file_bytes.saturating_sub(data_start);

    for info in tensors.iter() {
        let end = info
            .offset
            .checked_add(info.bytes)
            .filter(|&end| end <= data_bytes);
        if end.is_none() {
            return Err(GgufError::OutsideFile {
                tensor: info.name.clone(),
                offset: info.offset,
                bytes: info.bytes,
                data_bytes,
            });
        }
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|info| info.offset);
    for (first, second) in order.iter().zip(order.iter().skip(1)) {
        if first.offset + first.bytes > second.offset {
            return Err(GgufError::Overlap {
                first: first.name.clone(),
                second: second.name.clone(),
                offset: second.offset,
            });
        }
    }
    for info in tensors {
        info.offset += data_start;
    }
    Ok(())
}

/// A bounds-checked cursor.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: u64, what: &'static str) -> Result<&'a [u8], GgufError> {
        let left = self.bytes.get(self.at..).unwrap_or_default();
        let taken = usize::try_from(count)
            .ok()
            .and_then(|count| left.get(..count));
        let Some(taken) = taken else {
            return Err(GgufError::Truncated {
                what,
                offset: self.at as u64,
                needed: count,
                left: left.len() as u64,
            });
        };
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn count(&mut self, what: &'static str, limit: u64) -> Result<u64, GgufError> {
        let found = self.u64(what)?;
        if found > limit {
            return Err(GgufError::TooMany { what, found, limit });
        }
        Ok(found)
    }

    fn text(&mut self, what: &'static str, limit: u64) -> Result<&'a str, GgufError> {
        let found = self.u64(what)?;
        if found > limit {
            return Err(GgufError::TooMany { what, found, limit });
        }
        let offset = self.at as u64;
        let bytes = self.take(found, what)?;
        str::from_utf8(bytes).map_err(|_| GgufError::NotUtf8 { what, offset })
    }

    fn value(&mut self, key: &str, type_id: u32) -> Result<Value, GgufError> {
        match type_id {
            TYPE_TEXT => self
                .text("a metadata text", TEXT_BYTES_MAX)
                .map(|text| Value::Text(text.into())),
            TYPE_ARRAY => {
                let type_id = self.u32("an array's value type")?;
                let count = self.count("the length of a metadata array", ARRAY_VALUES_MAX)?;
                self.list(key, type_id, count)
            }
            _ => self.scalar(key, type_id),
        }
    }

    fn scalar(&mut self, key: &str, type_id: u32) -> Result<Value, GgufError> {
        const WHAT: &str = "a metadata value";
        Ok(match type_id {
            6 => Value::Float(f32::from_le_bytes(self.array(WHAT)?).into()),
            7 => Value::Bool(self.integer(key, 7)? == 1),
            12 => Value::Float(f64::from_le_bytes(self.array(WHAT)?)),
            _ => Value::Int(self.integer(key, type_id)?),
        })
    }

    /// An integer of any width, or a truth value as 0 or 1.
    fn integer(&mut self, key: &str, type_id: u32) -> Result<i128, GgufError> {
        const WHAT: &str = "a metadata value";
        Ok(match type_id {
            0 => u8::from_le_bytes(self.array(WHAT)?).into(),
            1 => i8::from_le_bytes(self.array(WHAT)?).into(),
            2 => u16::from_le_bytes(self.array(WHAT)?).into(),
            3 => i16::from_le_bytes(self.array(WHAT)?).into(),
            4 => u32::from_le_bytes(self.array(WHAT)?).into(),
            5 => i32::from_le_bytes(self.array(WHAT)?).into(),
            7 => match self.array::<1>(WHAT)? {
                [flag @ 0..=1] => flag.into(),
                [found] => {
                    return Err(GgufError::BadBool {
                        key: key.to_owned(),
                        found,
                    });
                }
            },
            10 => u64::from_le_bytes(self.array(WHAT)?).into(),
            11 => i64::from_le_bytes(self.array(WHAT)?).into(),
            id => {
                return Err(GgufError::ValueType {
                    key: key.to_owned(),
                    id,
                });
            }
        })
    }

    fn list(&mut self, key: &str, type_id: u32, count: u64) -> Result<Value, GgufError> {
        match type_id {
            TYPE_ARRAY => Err(GgufError::Nested {
                key: key.to_owned(),
            }),
            TYPE_TEXT => {
                let mut texts = TextList::default();
                for _ in 0..count {
                    texts.push(self.text("a text in a metadata array", TEXT_BYTES_MAX)?);
                }
                Ok(Value::Texts(texts))
            }
            6 | 12 => {
                let mut floats = Vec::new();
                for _ in 0..count {
                    floats.push(self.narrow_float(type_id)?);
                }
                Ok(Value::Floats(floats))
            }
            _ => {
                let mut ints = Vec::new();
                for _ in 0..count {
                    let found = self.integer(key, type_id)?;
                    ints.push(i64::try_from(found).map_err(|_| GgufError::Range {
                        key: key.to_owned(),
                        found,
                        min: i64::MIN.into(),
                        max: i64::MAX.into(),
                    })?);
                }
                Ok(Value::Ints(ints))
            }
        }
    }

    fn narrow_float(&mut self, type_id: u32) -> Result<f32, GgufError> {
        const WHAT: &str = "a metadata value";
        if type_id == 6 {
            return self.array(WHAT).map(f32::from_le_bytes);
        }
        #[expect(
            clippy::cast_possible_truncation,
            reason = "arrays of floats are narrowed"
        )]
        self.array(WHAT)
            .map(|bytes| f64::from_le_bytes(bytes) as f32)
    }
}
