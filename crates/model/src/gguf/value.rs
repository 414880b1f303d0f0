//! The value types of GGUF metadata.

use super::reader::Reader;
use crate::error::{Error, Result};

/// Arrays may hold arrays; real files stop at one level.
const MAX_NESTING: usize = 4;

const ARRAY_CODE: u32 = 9;

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// The elements of an array, which all have one type.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Value {
    /// The type's name, for error lines.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "a u8",
            Self::I8(_) => "an i8",
            Self::U16(_) => "a u16",
            Self::I16(_) => "an i16",
            Self::U32(_) => "a u32",
            Self::I32(_) => "an i32",
            Self::F32(_) => "an f32",
            Self::Bool(_) => "a bool",
            Self::String(_) => "a string",
            Self::Array(_) => "an array",
            Self::U64(_) => "a u64",
            Self::I64(_) => "an i64",
            Self::F64(_) => "an f64",
        }
    }

    /// The code by which the format names the type.
    pub fn type_code(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Array(_) => ARRAY_CODE,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }

    /// Any integer type, if it is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(n) => Some(n.into()),
            Self::U16(n) => Some(n.into()),
            Self::U32(n) => Some(n.into()),
            Self::U64(n) => Some(n),
            Self::I8(n) => n.try_into().ok(),
            Self::I16(n) => n.try_into().ok(),
            Self::I32(n) => n.try_into().ok(),
            Self::I64(n) => n.try_into().ok(),
            _ => None,
        }
    }

    /// Either float type.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(x) => Some(x.into()),
            Self::F64(x) => Some(x),
            _ => None,
        }
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let code = reader.u32("the value's type")?;
        const WHAT: &str = "the value";
        Ok(match code {
            0 => Self::U8(u8::from_le_bytes(reader.array(WHAT)?)),
            1 => Self::I8(i8::from_le_bytes(reader.array(WHAT)?)),
            2 => Self::U16(u16::from_le_bytes(reader.array(WHAT)?)),
            3 => Self::I16(i16::from_le_bytes(reader.array(WHAT)?)),
            4 => Self::U32(reader.u32(WHAT)?),
            5 => Self::I32(i32::from_le_bytes(reader.array(WHAT)?)),
            6 => Self::F32(f32::from_le_bytes(reader.array(WHAT)?)),
            7 => Self::Bool(bool_from(u8::from_le_bytes(reader.array(WHAT)?), reader)?),
            8 => Self::String(reader.string(WHAT)?.to_owned()),
            ARRAY_CODE => Self::Array(Array::read(reader, 0)?),
            10 => Self::U64(reader.u64(WHAT)?),
            11 => Self::I64(i64::from_le_bytes(reader.array(WHAT)?)),
            12 => Self::F64(f64::from_le_bytes(reader.array(WHAT)?)),
            other => {
                return Err(Error::format(format!(
                    "value type {other} before byte {} is not known",
                    reader.pos()
                )));
            }
        })
    }
}

impl Array {
    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::Array(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F64(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as non-negative integers; `None` for other types or a negative element.
    pub fn to_u64s(&self) -> Option<Vec<u64>> {
        fn all<T: Copy + TryInto<u64>>(v: &[T]) -> Option<Vec<u64>> {
            v.iter().map(|&n| n.try_into().ok()).collect()
        }
        match self {
            Self::U8(v) => all(v),
            Self::I8(v) => all(v),
            Self::U16(v) => all(v),
            Self::I16(v) => all(v),
            Self::U32(v) => all(v),
            Self::I32(v) => all(v),
            Self::U64(v) => all(v),
            Self::I64(v) => all(v),
            _ => None,
        }
    }

    fn read(reader: &mut Reader<'_>, depth: usize) -> Result<Self> {
        if depth == MAX_NESTING {
            return Err(Error::format(format!(
                "arrays nested deeper than {MAX_NESTING} at byte {}",
                reader.pos()
            )));
        }
        let code = reader.u32("the array's element type")?;
        let count = reader.u64("the array's length")?;
        Ok(match code {
            0 => Self::U8(numbers(reader, count, u8::from_le_bytes)?),
            1 => Self::I8(numbers(reader, count, i8::from_le_bytes)?),
            2 => Self::U16(numbers(reader, count, u16::from_le_bytes)?),
            3 => Self::I16(numbers(reader, count, i16::from_le_bytes)?),
            4 => Self::U32(numbers(reader, count, u32::from_le_bytes)?),
            5 => Self::I32(numbers(reader, count, i32::from_le_bytes)?),
            6 => Self::F32(numbers(reader, count, f32::from_le_bytes)?),
            7 => {
                let raw = numbers(reader, count, u8::from_le_bytes)?;
                Self::Bool(raw.into_iter().map(|b| bool_from(b, reader)).collect::<Result<_>>()?)
            }
            8 => {
                let count = reader.plausible(count, 8, "strings")?;
                let strings = (0..count)
                    .map(|i| Ok(reader.string(format_args!("string {i} of the array"))?.to_owned()))
                    .collect::<Result<_>>()?;
                Self::String(strings)
            }
            ARRAY_CODE => {
                let count = reader.plausible(count, 12, "arrays")?;
                Self::Array(
                    (0..count).map(|_| Self::read(reader, depth + 1)).collect::<Result<_>>()?,
                )
            }
            10 => Self::U64(numbers(reader, count, u64::from_le_bytes)?),
            11 => Self::I64(numbers(reader, count, i64::from_le_bytes)?),
            12 => Self::F64(numbers(reader, count, f64::from_le_bytes)?),
            other => {
                return Err(Error::format(format!(
                    "array element type {other} before byte {} is not known",
                    reader.pos()
                )));
            }
        })
    }
}

fn numbers<T, const N: usize>(
    reader: &mut Reader<'_>,
    count: u64,
    from: impl Fn([u8; N]) -> T,
) -> Result<Vec<T>> {
    let count = reader.plausible(count, N, "array elements")?;
    let raw = reader.take(count * N, "the array")?;
    let (chunks, _) = raw.as_chunks::<N>();
    Ok(chunks.iter().map(|&c| from(c)).collect())
}

fn bool_from(byte: u8, reader: &Reader<'_>) -> Result<bool> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::format(format!(
            "bool before byte {} is {other}, neither 0 nor 1",
            reader.pos()
        ))),
    }
}
