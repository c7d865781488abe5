//! Rules of the sources that no compiler checks: width, length, heads, words, the code map.
//!
//! Each check names every breach at once. A limit is never raised for one file; split the file.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Characters of a source line at most.
const WIDTH_MAX: usize = 100;

/// Lines of a source file at most.
const LINES_MAX: usize = 600;

/// Never in a source; spelled in two halves so that this file does not contain them.
const BANNED: &[(&str, &str)] = &[
    ("db", "g!("),
    ("FIX", "ME"),
    ("to", "do!("),
    ("unimple", "mented!("),
    ("XX", "X:"),
    ("#[ig", "nore"),
    ("#[should_", "panic"),
];

/// Never in any text of the repository: paths of one machine.
const MACHINE_PATHS: &[(&str, &str)] = &[("/wo", "rk/"), ("/ro", "ot/"), ("/ho", "me/")];

/// Folders that hold no sources of ours.
const SKIPPED: &[&str] = &[
    "target",
    ".git",
    "corpus",
    "artifacts",
    "node_modules",
    "__pycache__",
];

/// Folders whose crates may contain unsafe code, and the one file of the engine.
const UNSAFE_PLACES: &[&str] = &[
    "kernels/",
    "plugin/engine/src/mmap.rs",
    "plugin/capi/",
    "plugin/python/",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every file whose name ends in one of `endings`: path from the root with `/`, and text.
fn files(endings: &[&str]) -> Vec<(String, String)> {
    let (root, mut found) = (root(), Vec::new());
    let mut open = vec![root.clone()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).expect("a readable folder") {
            let path = entry.expect("a readable entry").path();
            let name = path
                .file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned();
            if path.is_symlink() || SKIPPED.contains(&name.as_str()) {
                continue;
            }
            if path.is_dir() {
                open.push(path);
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                let text = fs::read_to_string(&path).expect("UTF-8 text");
                let path = path.strip_prefix(&root).expect("below the root");
                let parts: Vec<_> = path.iter().map(|part| part.to_string_lossy()).collect();
                found.push((parts.join("/"), text));
            }
        }
    }
    found.sort();
    found
}

fn sources() -> Vec<(String, String)> {
    let sources = files(&[".rs"]);
    assert!(sources.len() > 10, "the sources were found");
    sources
}

fn assert_none(what: &str, breaches: &[String]) {
    assert!(breaches.is_empty(), "{what}:\n{}", breaches.join("\n"));
}

/// `path:line` of every line of a source for which `is_breach` says so.
fn lines_where(is_breach: impl Fn(&str) -> bool) -> Vec<String> {
    let mut breaches = Vec::new();
    for (path, text) in sources() {
        for (number, line) in text.lines().enumerate() {
            if is_breach(line) {
                breaches.push(format!("{path}:{}: {line}", number + 1));
            }
        }
    }
    breaches
}

#[test]
fn no_line_is_wider_than_the_limit() {
    assert_none(
        "too wide",
        &lines_where(|line| line.chars().count() > WIDTH_MAX),
    );
}

#[test]
fn sources_are_ascii() {
    assert_none("not ASCII", &lines_where(|line| !line.is_ascii()));
}

#[test]
fn no_source_contains_a_banned_word() {
    let banned: Vec<String> = BANNED.iter().map(|(a, b)| format!("{a}{b}")).collect();
    let breaches = lines_where(|line| banned.iter().any(|word| line.contains(word.as_str())));
    assert_none("banned words", &breaches);
}

#[test]
fn no_file_is_longer_than_the_limit() {
    let breaches: Vec<String> = sources()
        .iter()
        .map(|(path, text)| (path, text.lines().count()))
        .filter(|(_, lines)| *lines > LINES_MAX)
        .map(|(path, lines)| format!("{path}: {lines} lines, at most {LINES_MAX}"))
        .collect();
    assert_none("too long", &breaches);
}

#[test]
fn every_source_opens_by_saying_what_it_is() {
    let breaches: Vec<String> = sources()
        .into_iter()
        .filter(|(_, text)| !text.starts_with("//! "))
        .map(|(path, _)| path)
        .collect();
    assert_none("no `//!` in the first line", &breaches);
}

#[test]
fn no_module_hides_in_a_mod_file() {
    let hidden = ["mod", ".rs"].concat();
    let breaches: Vec<String> = sources()
        .into_iter()
        .map(|(path, _)| path)
        .filter(|path| path.rsplit('/').next() == Some(hidden.as_str()))
        .collect();
    assert_none("name the file after the module", &breaches);
}

#[test]
fn no_text_names_a_path_of_one_machine() {
    let mut breaches = Vec::new();
    for (path, text) in files(&[
        ".rs", ".toml", ".md", ".sh", ".py", ".yml", ".yaml", ".json",
    ]) {
        for (a, b) in MACHINE_PATHS {
            if text.contains(&format!("{a}{b}")) {
                breaches.push(format!("{path}: {a}{b}"));
            }
        }
    }
    assert_none("machine paths", &breaches);
}

#[test]
fn unsafe_code_is_only_where_it_may_be() {
    let keyword = ["un", "safe"].concat();
    let uses = [" {", " fn", " impl", " trait", " extern"].map(|rest| format!("{keyword}{rest}"));
    let mut breaches = Vec::new();
    for (path, text) in sources() {
        if UNSAFE_PLACES.iter().any(|place| path.starts_with(place)) {
            continue;
        }
        let forbids = text.contains(&format!("#![forbid({keyword}_code)]"));
        let is_crate_root = [
            "memory",
            "radix",
            "scheduler",
            "plugin/core",
            "plugin/server",
        ]
        .iter()
        .any(|krate| path == format!("{krate}/src/lib.rs"));
        if is_crate_root && !forbids {
            breaches.push(format!("{path}: must forbid {keyword} code"));
        }
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if uses.iter().any(|used| code.contains(used.as_str())) {
                breaches.push(format!("{path}:{}: {line}", number + 1));
            }
        }
    }
    assert_none("code that may not be there", &breaches);
}

/// Files of ARCHITECTURE.md's code map: a heading such as "### `radix/src/`" names the folder,
/// the first cell of each table row below it a file.
fn mapped_files(map: &str) -> BTreeSet<String> {
    let (mut folder, mut found) = (None, BTreeSet::new());
    for line in map.lines() {
        if line.starts_with('#') {
            folder = line.split('`').nth(1).filter(|name| name.ends_with('/'));
        }
        let cell = line
            .strip_prefix("| `")
            .and_then(|rest| rest.split_once('`'));
        if let (Some(folder), Some((name, _))) = (folder, cell)
            && name.ends_with(".rs")
        {
            found.insert(format!("{folder}{name}"));
        }
    }
    found
}

/// The row of the code map for a file: its name, and the first sentence of its head.
fn row_to_add(path: &str, text: &str) -> String {
    let head: Vec<&str> = text
        .lines()
        .map_while(|line| line.strip_prefix("//! "))
        .collect();
    let head = head.join(" ");
    let sentence = head
        .split_once(". ")
        .map_or(head.as_str(), |(first, _)| first);
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    format!(
        "under \"### `{folder}/`\": | `{name}` | {} |",
        sentence.trim_end_matches('.')
    )
}

#[test]
fn the_code_map_names_every_source_and_no_other() {
    let path = root().join("ARCHITECTURE.md");
    let map = fs::read_to_string(path).expect("ARCHITECTURE.md at the root");
    let mapped = mapped_files(&map);
    let sources = sources();
    let missing: Vec<String> = sources
        .iter()
        .filter(|(path, _)| !mapped.contains(path))
        .map(|(path, text)| row_to_add(path, text))
        .collect();
    assert_none("not in the code map of ARCHITECTURE.md; add", &missing);
    let present: BTreeSet<String> = sources.into_iter().map(|(path, _)| path).collect();
    let gone: Vec<String> = mapped.difference(&present).cloned().collect();
    assert_none("in the code map, but not there", &gone);
}

#[test]
fn the_code_map_names_tests_that_exist() {
    let map = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let all: String = sources().into_iter().map(|(_, text)| text).collect();
    let gone: Vec<String> = map
        .split("`test:")
        .skip(1)
        .filter_map(|rest| rest.split('`').next())
        .filter(|name| !all.contains(&format!("fn {name}(")))
        .map(str::to_owned)
        .collect();
    assert_none("tests named by ARCHITECTURE.md that are not there", &gone);
}

/// Unsafe blocks, impls and functions in a source, outside of comments.
fn unsafe_places(text: &str) -> usize {
    let keyword = ["un", "safe"].concat();
    let forms = [" {", " fn", " impl", " trait", " extern"].map(|rest| format!("{keyword}{rest}"));
    let code = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    code.map(|code| {
        forms
            .iter()
            .map(|form| code.matches(form.as_str()).count())
            .sum::<usize>()
    })
    .sum()
}

#[test]
fn the_safety_page_counts_every_unsafe_place() {
    let page = fs::read_to_string(root().join("SAFETY.md")).expect("SAFETY.md at the root");
    let written: BTreeSet<String> = page
        .lines()
        .filter_map(|line| {
            let mut cells = line.strip_prefix("| `")?.split('|');
            let name = cells.next()?.trim().trim_end_matches('`');
            Some(format!("{name}: {}", cells.next()?.trim()))
        })
        .collect();
    let found: BTreeSet<String> = sources()
        .iter()
        .map(|(path, text)| (path, unsafe_places(text)))
        .filter(|(_, places)| *places > 0)
        .map(|(path, places)| format!("{path}: {places}"))
        .collect();
    let missing: Vec<String> = found.difference(&written).cloned().collect();
    assert_none("not in the table of SAFETY.md", &missing);
    let gone: Vec<String> = written.difference(&found).cloned().collect();
    assert_none("in the table of SAFETY.md, but not in the sources", &gone);
}
