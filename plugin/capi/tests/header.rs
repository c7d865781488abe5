//! The header is what the sources give: `ROOTSTOCK_WRITE_HEADER=1 cargo test -p rootstock-capi
//! --test header` writes it anew.

use std::path::Path;

#[test]
fn the_header_is_made_from_the_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config =
        cbindgen::Config::from_file(folder.join("cbindgen.toml")).expect("a configuration");
    let made = cbindgen::generate_with_config(folder, config).expect("a header");
    let mut text = Vec::new();
    made.write(&mut text);
    let text = String::from_utf8(text).expect("text");
    let path = folder.join("include/rootstock.h");
    if std::env::var_os("ROOTSTOCK_WRITE_HEADER").is_some() {
        std::fs::write(&path, &text).expect("the header can be written");
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == text,
        "include/rootstock.h is not what plugin/capi/src gives; write it anew as the head of \
         tests/header.rs says, and raise ROOTSTOCK_ABI_VERSION if something a host uses changed"
    );
}
