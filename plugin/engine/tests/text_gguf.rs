//! GGUF files: what is written is read back, and no broken byte is trusted or makes it panic.

use proptest::prelude::*;
use rootstock_engine::gguf::{Gguf, GgufError, GgufWriter, TensorType, Value};

fn small() -> GgufWriter {
    GgufWriter::new()
        .text("general.architecture", "llama")
        .int("llama.block_count", 2)
        .int("llama.vocab_size", 1_i128 << 40)
        .int("below", -7)
        .float("llama.rope.freq_base", 1e5)
        .value("flag", Value::Bool(true))
        .value("ids", Value::Ints(vec![1, -2, 3]))
        .value("wide", Value::Ints(vec![1, 1 << 40]))
        .value("scores", Value::Floats(vec![0.5, -1.0]))
        .texts("tokens", ["a", "", "\u{2581}b"])
        .tensor_f32("norm", &[3], &[1.0, 2.0, 3.0])
        .tensor("weight", &[32, 2], TensorType::Q4_1, (0..40).collect())
}

fn refused(writer: &GgufWriter) -> String {
    Gguf::from_bytes(writer.to_bytes())
        .expect_err("the file must be refused")
        .to_string()
}

#[test]
fn what_is_written_is_read_back() {
    let file = Gguf::from_bytes(small().to_bytes()).unwrap();
    assert_eq!(file.version(), 3);
    assert_eq!(file.text("general.architecture").unwrap(), "llama");
    assert_eq!(file.u32("llama.block_count").unwrap(), 2);
    assert_eq!(file.f32("llama.rope.freq_base").unwrap(), 1e5);
    assert_eq!(file.bool_opt("flag").unwrap(), Some(true));
    assert_eq!(file.ints_opt("ids").unwrap(), Some([1, -2, 3].as_slice()));
    assert_eq!(
        file.ints_opt("wide").unwrap(),
        Some([1, 1 << 40].as_slice())
    );
    assert_eq!(
        file.floats_opt("scores").unwrap(),
        Some([0.5, -1.0].as_slice())
    );
    let tokens = file.texts_opt("tokens").unwrap().unwrap();
    assert_eq!(tokens.iter().collect::<Vec<_>>(), ["a", "", "\u{2581}b"]);

    let norm = file.tensor("norm").unwrap();
    assert_eq!(
        (norm.info.shape(), norm.info.ty()),
        ([3].as_slice(), TensorType::F32)
    );
    assert_eq!(
        norm.data,
        [1.0_f32, 2.0, 3.0].map(f32::to_le_bytes).concat()
    );
    let weight = file.tensor("weight").unwrap();
    assert_eq!((weight.info.row_values(), weight.info.rows()), (32, 2));
    assert_eq!(weight.data, (0..40).collect::<Vec<u8>>());
    assert!(file.tensor("bias").is_none());
}

#[test]
fn a_file_on_disk_reads_as_the_same_bytes_in_memory() {
    let path = std::env::temp_dir().join(format!("rootstock-gguf-{}.gguf", std::process::id()));
    small().write(&path).unwrap();
    let file = Gguf::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(
        file.tensor("weight").unwrap().data,
        (0..40).collect::<Vec<u8>>()
    );
    assert_eq!(file.file_bytes(), small().to_bytes().len() as u64);
}

#[test]
fn accessors_name_the_key_and_what_is_wrong() {
    let file = Gguf::from_bytes(small().to_bytes()).unwrap();
    let say = |error: GgufError| error.to_string();
    assert_eq!(
        say(file.u32("absent").unwrap_err()),
        "metadata `absent` is missing"
    );
    assert_eq!(file.u32_opt("absent").unwrap(), None);
    assert_eq!(
        say(file.text("flag").unwrap_err()),
        "metadata `flag` is of kind bool, wanted text"
    );
    assert_eq!(
        say(file.u32("llama.vocab_size").unwrap_err()),
        "metadata `llama.vocab_size` is 1099511627776; allowed are 0 to 4294967295"
    );
    assert!(say(file.u32("below").unwrap_err()).contains("-7"));
}

#[test]
fn files_that_do_not_exist_or_are_empty_are_refused_with_their_path() {
    let path = std::path::Path::new("no-such-folder/model.gguf");
    let error = Gguf::open(path).unwrap_err();
    assert!(error.to_string().contains("no-such-folder/model.gguf"));
    let error = Gguf::from_bytes(Vec::new()).unwrap_err();
    assert!(error.to_string().contains("not a GGUF file"), "{error}");
    assert!(
        Gguf::open(&std::env::temp_dir()).is_err(),
        "a folder is not a model"
    );
}

#[test]
fn other_versions_and_byte_orders_are_refused_by_number() {
    let with_version = |version: [u8; 4]| {
        let mut bytes = small().to_bytes();
        bytes[4..8].copy_from_slice(&version);
        Gguf::from_bytes(bytes)
    };
    assert_eq!(with_version([2, 0, 0, 0]).unwrap().version(), 2);
    assert!(
        with_version([1, 0, 0, 0])
            .unwrap_err()
            .to_string()
            .contains("version 1")
    );
    assert!(
        with_version([4, 0, 0, 0])
            .unwrap_err()
            .to_string()
            .contains("version 4")
    );
    assert!(
        with_version([0, 0, 0, 3])
            .unwrap_err()
            .to_string()
            .contains("big-endian")
    );
}

#[test]
fn every_truncation_is_refused() {
    let bytes = small().to_bytes();
    let data_end = bytes.len() - (bytes.len() - 40) % 32; // The last tensor has no padding to lose.
    for len in 0..data_end - 32 {
        assert!(
            Gguf::from_bytes(bytes[..len].to_vec()).is_err(),
            "{len} of {data_end} bytes"
        );
    }
}

#[test]
fn a_claimed_count_far_beyond_the_file_costs_nothing() {
    for (at, what) in [
        (8, "the number of tensors"),
        (16, "the number of metadata keys"),
    ] {
        let mut bytes = small().to_bytes();
        bytes[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        let error = Gguf::from_bytes(bytes).unwrap_err().to_string();
        assert!(
            error.contains(what) && error.contains("18446744073709551615"),
            "{error}"
        );
    }
}

#[test]
fn rows_that_are_not_whole_blocks_are_refused_by_tensor_name() {
    let file = GgufWriter::new().tensor("ffn", &[576], TensorType::from_id(12).unwrap(), vec![]);
    assert_eq!(
        refused(&file),
        "tensor `ffn` has rows of 576 values, not a multiple of the 256 values of a Q4_K block"
    );
    // The count of all values divides, the row does not.
    let file = GgufWriter::new().tensor("w", &[16, 4], TensorType::Q8_0, vec![0; 68]);
    assert!(refused(&file).contains("`w` has rows of 16 values"));
}

#[test]
fn tensors_outside_the_file_are_refused_with_their_size() {
    let file = GgufWriter::new().tensor("w", &[1 << 20], TensorType::F32, vec![0; 16]);
    assert!(refused(&file).contains("`w` of 4194304 bytes at data offset 0 ends beyond"));
}

#[test]
fn impossible_shapes_are_refused() {
    for shape in [vec![0], vec![4, 0], vec![u64::MAX], vec![1 << 32, 1 << 32]] {
        let file = GgufWriter::new().tensor("w", &shape, TensorType::F32, vec![0; 64]);
        assert!(refused(&file).contains("`w` has the shape"), "{shape:?}");
    }
    for shape in [vec![], vec![1; 5]] {
        let file = GgufWriter::new().tensor("w", &shape, TensorType::F32, vec![0; 64]);
        assert!(
            refused(&file).contains("dimensions; allowed are 1 to 4"),
            "{shape:?}"
        );
    }
}

#[test]
fn names_that_occur_twice_are_refused() {
    assert_eq!(
        refused(&GgufWriter::new().int("a", 1).int("a", 2)),
        "metadata key `a` occurs twice"
    );
    let file = GgufWriter::new()
        .tensor_f32("w", &[1], &[0.0])
        .tensor_f32("w", &[1], &[0.0]);
    assert_eq!(refused(&file), "tensor `w` occurs twice");
}

#[test]
fn overlapping_and_misaligned_tensors_are_refused() {
    let bytes = GgufWriter::new()
        .tensor_f32("first", &[16], &[0.0; 16])
        .tensor_f32("second", &[16], &[0.0; 16])
        .to_bytes();
    let at = bytes
        .windows(6)
        .position(|window| window == b"second")
        .unwrap()
        + 6
        + 4
        + 8
        + 4;
    let with_offset = |offset: u64| {
        let mut bytes = bytes.clone();
        bytes[at..at + 8].copy_from_slice(&offset.to_le_bytes());
        Gguf::from_bytes(bytes)
    };
    assert!(with_offset(64).is_ok());
    let error = with_offset(32).unwrap_err().to_string();
    assert_eq!(
        error,
        "tensors `first` and `second` overlap at data offset 32"
    );
    let error = with_offset(65).unwrap_err().to_string();
    assert_eq!(
        error,
        "tensor `second` begins at 65, not a multiple of the alignment 32"
    );
    assert!(
        with_offset(u64::MAX - 31).is_err(),
        "an offset whose end overflows"
    );
}

#[test]
fn bad_alignments_and_split_files_are_refused() {
    for alignment in [0, 3, 1 << 30] {
        let file = GgufWriter::new().int("general.alignment", alignment);
        assert!(
            refused(&file).contains("`general.alignment`"),
            "{alignment}"
        );
    }
    assert!(refused(&GgufWriter::new().int("split.count", 3)).contains("split into 3 files"));
    assert!(Gguf::from_bytes(GgufWriter::new().int("split.count", 1).to_bytes()).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    /// Random edits of a good file: never a panic, and what is accepted can be read in full.
    #[test]
    fn mutated_files_are_refused_or_consistent(
        edits in prop::collection::vec((0_usize..1100, any::<u8>()), 1..6),
        wide in prop::option::of((0_usize..1100, any::<u64>())),
        cut in prop::option::of(0_usize..1100),
    ) {
        let mut bytes = small().to_bytes();
        for (at, byte) in edits {
            let len = bytes.len();
            bytes[at % len] = byte;
        }
        if let Some((at, value)) = wide {
            let at = at % (bytes.len() - 8);
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        bytes.truncate(cut.unwrap_or(usize::MAX));
        if let Ok(file) = Gguf::from_bytes(bytes) {
            for info in file.tensors() {
                let view = file.tensor(info.name()).expect("a listed tensor can be read");
                prop_assert_eq!(view.data.len() as u64, info.bytes());
                let blocks = info.rows() * info.row_values() / info.ty().block_values();
                prop_assert_eq!(info.bytes(), blocks * info.ty().block_bytes());
            }
            for (key, value) in file.values() {
                if let Value::Texts(texts) = value {
                    prop_assert_eq!(texts.iter().count(), texts.len());
                }
                prop_assert_eq!(file.value(key), Some(value));
            }
        }
    }

    /// Bytes that were never a GGUF file.
    #[test]
    fn random_bytes_never_panic(tail in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tail);
        let _refused_or_not = Gguf::from_bytes(bytes);
    }
}
