//! Model files of any bytes: they are refused by name, or read, with everything that is made from a
//! header: the model's shape, its tokenizer, its chat template. Nothing panics, and no number in a
//! header makes memory be asked for that the file does not have.
//!
//! `cargo +nightly fuzz run gguf -- -max_total_time=60`, in `tests/`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rootstock_engine::gguf::Gguf;
use rootstock_engine::model::ModelConfig;
use rootstock_engine::template::ChatTemplate;
use rootstock_engine::tokenizer::Tokenizer;

fuzz_target!(|rest: &[u8]| {
    // The magic and a version that is taken; what follows is anything.
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend_from_slice(rest);
    let Ok(file) = Gguf::from_bytes(bytes) else {
        return;
    };
    for tensor in file.tensors() {
        let view = file.tensor(tensor.name());
        assert!(view.is_some(), "a tensor that is listed is there");
    }
    let _ = ModelConfig::read(&file);
    if let Ok(tokenizer) = Tokenizer::from_gguf(&file) {
        let _ = ChatTemplate::from_gguf(&file, &tokenizer);
    }
});
