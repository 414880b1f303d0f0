//! The GGUF reader on valid files, on files broken on purpose, and on damaged ones.

use device::BlockType;
use model::gguf::{Array, Value};
use model::testing::{GgufWriter, TinyModel};
use model::{Architecture, Gguf, ModelPackage, SharedBytes};
use proptest::prelude::*;

fn parse(bytes: Vec<u8>) -> model::Result<Gguf> {
    Gguf::parse(SharedBytes::from(bytes))
}

/// The error of a file that must not be read: one line, with all of `parts`.
#[track_caller]
fn refused(bytes: Vec<u8>, parts: &[&str]) {
    let error = parse(bytes).expect_err("a broken file").to_string();
    assert!(!error.contains('\n'), "{error}");
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

fn f32s(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| (i as f32).to_le_bytes()).collect()
}

fn small() -> GgufWriter {
    let mut file = GgufWriter::new();
    file.set("general.architecture", Value::String("llama".into()))
        .set("a.list", Value::Array(Array::String(vec!["one".into(), "two".into()])))
        .tensor("w", &[4, 2], 0, f32s(8))
        .tensor("v", &[3], 0, f32s(3));
    file
}

#[test]
fn every_value_type_comes_back() {
    let values = [
        Value::U8(200),
        Value::I8(-3),
        Value::U16(60_000),
        Value::I16(-300),
        Value::U32(4_000_000_000),
        Value::I32(-70_000),
        Value::F32(1.5),
        Value::Bool(true),
        Value::String("tëxt".into()),
        Value::U64(1 << 63),
        Value::I64(-(1 << 62)),
        Value::F64(0.1),
        Value::Array(Array::U8(vec![1, 2])),
        Value::Array(Array::I8(vec![-1])),
        Value::Array(Array::U16(vec![500])),
        Value::Array(Array::I16(vec![-500])),
        Value::Array(Array::U32(vec![])),
        Value::Array(Array::I32(vec![-1, 1])),
        Value::Array(Array::F32(vec![0.5])),
        Value::Array(Array::Bool(vec![false, true])),
        Value::Array(Array::String(vec![String::new(), "x".into()])),
        Value::Array(Array::U64(vec![u64::MAX])),
        Value::Array(Array::I64(vec![i64::MIN])),
        Value::Array(Array::F64(vec![2.5])),
        Value::Array(Array::Array(vec![Array::U8(vec![7]), Array::String(vec!["y".into()])])),
    ];
    for version in [2, 3] {
        let mut file = GgufWriter { version, ..GgufWriter::new() };
        for (i, value) in values.iter().enumerate() {
            file.set(format!("key.{i}"), value.clone());
        }
        let gguf = parse(file.build()).expect("a valid file");
        assert_eq!(gguf.version(), version);
        let read: Vec<&Value> = gguf.metadata().iter().map(|(_, v)| v).collect();
        assert_eq!(read, values.iter().collect::<Vec<_>>());
    }
}

#[test]
fn tensors_lie_where_the_alignment_puts_them() {
    for alignment in [1, 8, 32, 4096] {
        let mut file = small();
        file.alignment = alignment;
        file.set("general.alignment", Value::U32(alignment as u32));
        let gguf = parse(file.build()).expect("a valid file");
        let v = gguf.tensor("v").expect("tensor v");
        assert_eq!((v.dtype, v.dims.as_slice(), v.len), (BlockType::F32, [3].as_slice(), 12));
        assert!(v.offset.is_multiple_of(alignment));
        assert_eq!(gguf.tensor_bytes(v).as_deref(), Some(f32s(3).as_slice()));
    }
}

#[test]
fn wrong_headers() {
    refused(b"".to_vec(), &["magic", "byte 0"]);
    refused(b"GGML\x03\0\0\0".to_vec(), &["not a GGUF file"]);
    for (version, part) in [(0, "version 0"), (1, "version 1"), (4, "version 4")] {
        refused(GgufWriter { version, ..small() }.build(), &[part]);
    }
    refused(GgufWriter { version: 3 << 24, ..small() }.build(), &["big-endian"]);
}

#[test]
fn huge_counts_are_refused_before_anything_is_reserved() {
    for count in [1 << 20, u64::MAX / 2, u64::MAX] {
        let announced = format!("{count} metadata entries");
        refused(GgufWriter { metadata_count: Some(count), ..small() }.build(), &[&announced]);
        let announced = format!("{count} tensors");
        refused(GgufWriter { tensor_count: Some(count), ..small() }.build(), &[&announced]);
    }
    // An array and a string that claim to be longer than the file.
    for (code, what) in [(8u32, "string"), (9, "array"), (4, "array"), (12, "array")] {
        let mut bytes = GgufWriter { metadata_count: Some(1), ..GgufWriter::new() }.build();
        bytes.truncate(24);
        bytes.extend(1u64.to_le_bytes());
        bytes.extend(b"k");
        bytes.extend(9u32.to_le_bytes());
        bytes.extend(code.to_le_bytes());
        bytes.extend((u64::MAX - 3).to_le_bytes());
        bytes.extend([0; 64]);
        refused(bytes, &["key \"k\" at byte 24", what]);
    }
}

#[test]
fn strings_that_do_not_fit() {
    let mut bytes = small().build();
    // The length of the first key.
    bytes[24..32].copy_from_slice(&(u64::MAX).to_le_bytes());
    refused(bytes, &["key of metadata entry 0", "byte 24", "18446744073709551615"]);

    let mut bytes = small().build();
    bytes[32] = 0xFF;
    refused(bytes, &["key of metadata entry 0", "not UTF-8"]);

    let mut file = small();
    file.set("", Value::U8(0));
    refused(file.build(), &["key of metadata entry 2", "empty"]);
    let mut file = small();
    file.set("k".repeat(70_000), Value::U8(0));
    refused(file.build(), &["70000 bytes", "65535"]);
}

#[test]
fn wrong_values() {
    let mut nested = Array::U8(vec![1]);
    for _ in 0..6 {
        nested = Array::Array(vec![nested]);
    }
    let mut file = small();
    file.set("deep", Value::Array(nested));
    refused(file.build(), &["key \"deep\"", "nested"]);

    let mut file = GgufWriter::new();
    file.set("flag", Value::Bool(true));
    let mut bytes = file.build();
    // magic, version, counts; length and name of the key; type; the bool itself.
    bytes[24 + 8 + 4 + 4] = 2;
    refused(bytes, &["key \"flag\"", "bool", "2"]);

    let mut bytes = file.build();
    bytes[24 + 8 + 4] = 99;
    refused(bytes, &["key \"flag\"", "type 99"]);
}

#[test]
fn duplicates() {
    let mut file = small();
    file.set("a.list", Value::U8(1));
    refused(file.build(), &["\"a.list\"", "twice"]);
    let mut file = small();
    file.tensor("w", &[1], 0, f32s(1));
    refused(file.build(), &["tensor \"w\"", "twice"]);
}

#[test]
fn wrong_alignments() {
    for (value, part) in [
        (Value::U32(0), "is 0"),
        (Value::U32(48), "is 48"),
        (Value::String("32".into()), "a string"),
        (Value::U64(32), "a u64"),
        (Value::I32(-32), "an i32"),
    ] {
        let mut file = small();
        file.set("general.alignment", value);
        refused(file.build(), &["\"general.alignment\"", part]);
    }
}

#[test]
fn wrong_dimensions() {
    for (dims, part) in [
        (&[5, 0][..], "dimension 1 is 0"),
        (&[0], "dimension 0 is 0"),
        (&[], "0 dimensions"),
        (&[1, 1, 1, 1, 1], "5 dimensions"),
        (&[1 << 40, 1 << 40], "overflow"),
        (&[u64::MAX, 2], "overflow"),
        // The product wraps to 4.
        (&[4, (1 << 62) + 1], "overflow"),
    ] {
        let mut file = small();
        file.tensor("bad", dims, 0, f32s(4));
        refused(file.build(), &["tensor \"bad\" at byte", part]);
    }
    // 65 bytes, as in the report that made this a rule: one tensor with dimensions [x, 0].
    let mut file = GgufWriter { alignment: 1, ..GgufWriter::new() };
    file.tensor("t", &[7, 0], 0, vec![]);
    refused(file.build(), &["tensor \"t\"", "dimension 1 is 0"]);
}

#[test]
fn wrong_tensor_types() {
    for code in [4, 5, 23, 31, 1000, u32::MAX] {
        let mut file = small();
        file.tensor("bad", &[32], code, f32s(32));
        refused(file.build(), &["tensor \"bad\"", &format!("type {code}")]);
    }
    let mut file = small();
    file.tensor("bad", &[33, 2], BlockType::Q4_0.to_ggml(), vec![0; 64]);
    refused(file.build(), &["tensor \"bad\"", "33", "Q4_0"]);
}

#[test]
fn tensors_outside_the_file_or_on_top_of_each_other() {
    for offset in [1 << 20, u64::MAX - 31, (i64::MAX as u64) - 31] {
        let mut file = small();
        file.tensor_at("bad", &[4], 0, offset);
        refused(file.build(), &["tensor \"bad\"", &offset.to_string()]);
    }
    let mut file = small();
    file.tensor_at("bad", &[4], 0, 16);
    refused(file.build(), &["tensor \"bad\"", "offset 16", "multiple of 32"]);
    let mut file = small();
    file.tensor_at("bad", &[1], 0, 0);
    refused(file.build(), &["\"w\"", "\"bad\"", "overlap"]);
}

fn tiny() -> Vec<u8> {
    TinyModel::new(Architecture::Llama, 1).gguf().build()
}

/// Reads everything there is to read; the result does not matter, only that there is one.
fn open(bytes: Vec<u8>) -> model::Result<ModelPackage> {
    ModelPackage::from_gguf(&parse(bytes)?)
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = tiny();
    assert!(open(whole.clone()).is_ok());
    let header_end = Gguf::parse(whole.clone().into())
        .expect("a valid file")
        .tensors()
        .iter()
        .map(|t| t.offset)
        .min()
        .expect("tensors");
    for len in (0..header_end).chain((header_end..whole.len()).step_by(97)) {
        let error = open(whole[..len].to_vec()).expect_err("a cut file").to_string();
        assert!(!error.contains('\n') && error.len() < 400, "{len}: {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Damage in the header gives an error or a model, and never a panic or a huge allocation.
    #[test]
    fn flipped_bytes_do_no_harm(flips in prop::collection::vec((0usize..14_000, any::<u8>()), 1..4)) {
        let mut bytes = tiny();
        for (at, value) in flips {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        if let Err(error) = open(bytes) {
            prop_assert!(!error.to_string().contains('\n'));
        }
    }

    #[test]
    fn bytes_after_the_magic_may_be_anything(tail in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tail);
        let _ = open(bytes);
    }
}
