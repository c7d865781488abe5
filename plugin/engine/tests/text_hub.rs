//! Models out of a hub's repository, from a hub on this machine: what is downloaded, what is said
//! when it cannot be, and that nothing but the whole and right file is ever a model.
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use rootstock_engine::model_source::{
    HubAccess, HubError, ModelSource, ModelSpec, Progress, ResolvedModel, SourceError,
};

#[path = "support/hub.rs"]
mod hub;

use hub::{COMMIT, Hub, REPOSITORY, sha256};

/// A cache of its own for one test, removed at its end.
struct Cache(PathBuf);

impl Cache {
    fn new() -> Cache {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("rootstock-hub-{}-{number}", std::process::id());
        Cache(std::env::temp_dir().join(name))
    }

    fn resolve(&self, access: HubAccess, spec: &str) -> Result<ResolvedModel, SourceError> {
        let source = ModelSource::new(self.0.clone(), PathBuf::new()).with_hub(access);
        source.resolve(&spec.parse()?, &mut |_| {})
    }

    fn get(&self, hub: &Hub, file: &str) -> Result<ResolvedModel, SourceError> {
        let spec = format!("hf:{REPOSITORY}{file}");
        self.resolve(HubAccess::new(&hub.address, None), &spec)
    }

    fn refused(&self, hub: &Hub, file: &str) -> String {
        let error = self.get(hub, file).expect_err("no model");
        assert_eq!(self.models(), Vec::<PathBuf>::new(), "after: {error}");
        error.to_string()
    }

    /// The models in the cache.
    fn models(&self) -> Vec<PathBuf> {
        let mut open = vec![self.0.clone()];
        let mut found = Vec::new();
        while let Some(folder) = open.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    open.push(path);
                } else if path.extension().is_some_and(|ending| ending == "gguf") {
                    found.push(path);
                }
            }
        }
        found
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// Bytes that differ from place to place.
fn weights(len: usize) -> Vec<u8> {
    let byte = |at: usize| u8::try_from((at * 7 + at / 251) % 256).unwrap();
    (0..len).map(byte).collect()
}

#[test]
fn specs_of_repositories_are_read_or_refused() {
    let ModelSpec::Hub(file) = "hf:a-b/c.d@v1:sub/M-Q4.gguf".parse().unwrap() else {
        panic!("a repository")
    };
    assert_eq!(file.repository(), "a-b/c.d");
    assert_eq!(file.revision(), Some("v1"));
    assert_eq!(file.file(), Some("sub/M-Q4.gguf"));
    for bad in [
        "hf:",
        "hf:a",
        "hf:a/",
        "hf:/b",
        "hf:a/b/c",
        "hf:../b",
        "hf:a/b:x.txt",
        "hf:a/b:../x.gguf",
        "hf:a/b:/x.gguf",
        "hf:a/b:c//x.gguf",
        "hf:a/b@:x.gguf",
        "hf:a/b@c/d",
        "hf:a/b?c",
        "hf:a/b:x.gguf?y.gguf",
    ] {
        let error = bad.parse::<ModelSpec>().expect_err(bad).to_string();
        assert!(error.contains("hf:ORG/REPO"), "{error}");
    }
}

#[test]
fn a_model_is_downloaded_once_and_then_the_hub_is_not_asked() {
    let (cache, bytes) = (Cache::new(), weights(600_000));
    let hub = Hub::with_files(&[("README.md", b"x"), ("m-Q8_0.gguf", &bytes)]);
    let model = cache.get(&hub, "").unwrap();
    assert_eq!(fs::read(&model.path).unwrap(), bytes);
    assert_eq!(model.sha256, Some(sha256(&bytes)));
    assert_eq!(model.name, "m-Q8_0");
    assert!(model.path.ends_with("models/hf/an-org/a.model/m-Q8_0.gguf"));
    let asked = hub.asked();
    assert_eq!(asked.len(), 3, "{asked:?}");
    assert_eq!(
        asked[1].path,
        format!("/{REPOSITORY}/resolve/{COMMIT}/m-Q8_0.gguf")
    );
    assert!(!model.path.with_file_name(".partial").exists());

    let gone = HubAccess::new("http://127.0.0.1:1", None);
    let again = |spec: &str| cache.resolve(gone.clone(), spec);
    assert_eq!(again(&format!("hf:{REPOSITORY}")).unwrap(), model);
    let named = again(&format!("hf:{REPOSITORY}:m-Q8_0.gguf")).unwrap();
    assert_eq!((named, hub.asked()), (model, vec![]));
    let error = again(&format!("hf:{REPOSITORY}@v2"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("cannot be reached at http://127.0.0.1:1"),
        "{error}"
    );
    assert!(
        error.contains("HF_ENDPOINT") && error.contains("--model FILE"),
        "{error}"
    );
}

#[test]
fn the_token_goes_to_the_hub_and_not_to_where_it_redirects() {
    let (cache, bytes) = (Cache::new(), weights(1000));
    let hub = Hub::with_files(&[("m.gguf", &bytes)]);
    hub.change(|settings| settings.token = Some("secret".to_owned()));
    let error = cache.refused(&hub, "");
    assert!(
        error.contains("401") && error.contains("set HF_TOKEN"),
        "{error}"
    );
    assert!(!error.contains("may not"), "{error}");
    let spec = format!("hf:{REPOSITORY}");
    let wrong = HubAccess::new(&hub.address, Some("wrong"));
    let error = cache.resolve(wrong, &spec).unwrap_err().to_string();
    assert!(error.contains("the one that is set may not"), "{error}");
    hub.asked();

    let access = HubAccess::new(&hub.address, Some(" secret\n"));
    assert!(!format!("{access:?}").contains("secret"), "{access:?}");
    cache.resolve(access, &spec).unwrap();
    let tokens: Vec<_> = hub.asked().into_iter().map(|asked| asked.token).collect();
    let token = || Some("Bearer secret".to_owned());
    assert_eq!(tokens, [token(), token(), None]);
}

#[test]
fn what_the_hub_does_not_have_or_give_is_one_clear_error() {
    let (cache, bytes) = (Cache::new(), weights(1000));
    let hub = Hub::with_files(&[("a.gguf", &bytes), ("b.gguf", &bytes)]);
    let error = cache.refused(&hub, "");
    assert!(error.contains("several GGUF files") && error.contains("a.gguf, b.gguf"));
    let error = cache.refused(&hub, ":z.gguf");
    assert!(
        error.contains("no file z.gguf") && error.contains("a.gguf, b.gguf"),
        "{error}"
    );
    let error = cache.refused(&hub, "@v9");
    assert!(
        error.contains("404 for an-org/a.model (revision v9)"),
        "{error}"
    );
    let other = HubAccess::new(&hub.address, None);
    let error = cache.resolve(other, "hf:an-org/other").unwrap_err();
    assert!(
        error.to_string().contains("404 for an-org/other"),
        "{error}"
    );
    hub.change(|settings| settings.refuse = Some(403));
    let error = cache.refused(&hub, ":a.gguf");
    assert!(
        error.contains("403 for a.gguf: accept its terms"),
        "{error}"
    );
    hub.change(|settings| settings.busy = vec![503, 503, 503]);
    let error = cache.refused(&hub, ":a.gguf");
    assert!(error.contains("503"), "{error}");
    // Busy for a moment is no failure.
    hub.change(|settings| (settings.busy, settings.refuse) = (vec![503, 429], None));
    cache.get(&hub, ":a.gguf").unwrap();
}

#[test]
fn an_answer_that_is_no_listing_is_said_to_be_none() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            use std::io::{Read, Write};
            let mut socket = socket.unwrap();
            let _ = socket.read(&mut [0; 4096]).unwrap();
            let answer = b"HTTP/1.1 200 x\r\nconnection: close\r\n\r\n<html>log in</html>";
            socket.write_all(answer).unwrap();
        }
    });
    let access = HubAccess::new(&address, None);
    let error = Cache::new().resolve(access, "hf:a/b").unwrap_err();
    assert!(error.to_string().contains("not understood"), "{error}");
}

#[test]
fn a_line_that_breaks_is_taken_up_where_it_broke() {
    let (cache, bytes) = (Cache::new(), weights(3_000_000));
    let hub = Hub::with_files(&[("m.gguf", &bytes)]);
    // More pieces than tries: a piece that brings much is none of them.
    let piece = 1 << 20;
    hub.change(|settings| settings.cut = Some(piece));
    let model = cache.get(&hub, "").unwrap();
    assert_eq!(fs::read(&model.path).unwrap(), bytes);
    let asked = hub.asked();
    let parts = asked.iter().filter(|asked| asked.path == "/m.gguf");
    let ranges: Vec<_> = parts.map(|asked| asked.range.clone().unwrap()).collect();
    let wanted = (0..3).map(|part| format!("bytes={}-", part * piece));
    assert_eq!(ranges, wanted.collect::<Vec<_>>());
}

#[test]
fn what_one_start_did_not_finish_the_next_one_does() {
    let (cache, bytes) = (Cache::new(), weights(9000));
    let hub = Hub::with_files(&[("m.gguf", &bytes)]);
    hub.change(|settings| settings.cut = Some(1000));
    let error = cache.refused(&hub, "");
    assert!(
        error.contains("stopped at 5000 of 9000 bytes, 5 times"),
        "{error}"
    );
    assert!(error.contains("start again"), "{error}");
    hub.asked();
    hub.change(|settings| settings.cut = None);
    let model = cache.get(&hub, "").unwrap();
    assert_eq!(fs::read(&model.path).unwrap(), bytes);
    assert_eq!(hub.asked()[2].range.as_deref(), Some("bytes=5000-"));
}

#[test]
fn a_download_that_was_whole_but_not_yet_named_is_taken() {
    let (cache, bytes) = (Cache::new(), weights(9000));
    let hub = Hub::with_files(&[("m.gguf", &bytes)]);
    let partial = cache.0.join("models/hf/an-org/a.model/.partial");
    fs::create_dir_all(&partial).unwrap();
    fs::write(partial.join(format!("{}.part", sha256(&bytes))), &bytes).unwrap();
    let model = cache.get(&hub, "").unwrap();
    assert_eq!(fs::read(&model.path).unwrap(), bytes);
    assert_eq!(hub.asked()[2].range.as_deref(), Some("bytes=9000-"));
}

#[test]
fn what_is_left_of_other_bytes_is_never_continued() {
    let (cache, bytes) = (Cache::new(), weights(9000));
    let hub = Hub::with_files(&[("m.gguf", &bytes)]);
    hub.change(|settings| settings.cut = Some(1000));
    cache.refused(&hub, "");
    let newer: Vec<u8> = bytes.iter().rev().copied().collect();
    hub.change(|settings| {
        settings.cut = None;
        settings.files = vec![("m.gguf".to_owned(), newer.clone())];
    });
    hub.asked();
    let model = cache.get(&hub, "").unwrap();
    assert_eq!(fs::read(&model.path).unwrap(), newer);
    assert_eq!(hub.asked()[2].range.as_deref(), Some("bytes=0-"));
    // And what was damaged on disk is found by its digest, and gone.
    let partial = cache.0.join("models/hf/an-org/a.model/.partial");
    fs::create_dir_all(&partial).unwrap();
    let damaged = partial.join(format!("{}.part", sha256(&newer)));
    fs::write(&damaged, vec![0; 5000]).unwrap();
    fs::remove_file(&model.path).unwrap();
    let error = cache.refused(&hub, "");
    assert!(error.contains("the hub told"), "{error}");
    cache.get(&hub, "").unwrap();
}

#[test]
fn other_bytes_more_bytes_and_fewer_bytes_are_no_model() {
    let (cache, bytes) = (Cache::new(), weights(9000));
    let hub = Hub::with_files(&[("m.gguf", &bytes)]);
    hub.change(|settings| settings.rotten = true);
    let error = cache.refused(&hub, "");
    assert!(
        error.contains("SHA-256") && error.contains(&sha256(&bytes)),
        "{error}"
    );
    hub.change(|settings| (settings.rotten, settings.longer) = (false, 5));
    let error = cache.refused(&hub, "");
    assert!(error.contains("9005 bytes, the hub told 9000"), "{error}");
    // The same where only the redirect tells what is right.
    hub.change(|settings| settings.bare_listing = true);
    let error = cache.refused(&hub, "");
    assert!(error.contains("9005 bytes, the hub told 9000"), "{error}");
    hub.change(|settings| (settings.rotten, settings.longer) = (true, 0));
    let error = cache.refused(&hub, "");
    assert!(error.contains("SHA-256"), "{error}");
    hub.change(|settings| settings.rotten = false);
    cache.get(&hub, "").unwrap();
}

#[test]
fn a_hub_without_ranges_or_digests_gives_whole_files_or_none() {
    let (cache, bytes) = (Cache::new(), weights(9000));
    let hub = Hub::with_files(&[("m.gguf", &bytes)]);
    hub.change(|settings| {
        (settings.no_ranges, settings.bare_listing) = (true, true);
        (settings.no_etag, settings.cut) = (true, Some(4000));
    });
    let error = cache.refused(&hub, "");
    assert!(error.contains("stopped at 4000 of 9000 bytes"), "{error}");
    hub.change(|settings| settings.cut = None);
    let model = cache.get(&hub, "").unwrap();
    assert_eq!(fs::read(&model.path).unwrap(), bytes);
}

#[test]
fn a_stop_in_mid_download_keeps_what_is_there_for_the_next_start() {
    let (cache, bytes) = (Cache::new(), weights(3_000_000));
    let hub = Hub::with_files(&[("m.gguf", &bytes)]);
    let access = HubAccess::new(&hub.address, None);
    let source = ModelSource::new(cache.0.clone(), PathBuf::new()).with_hub(access);
    let cancel = source.cancel_flag();
    let spec: ModelSpec = format!("hf:{REPOSITORY}").parse().unwrap();
    let mut came = 0;
    let stopped = source.resolve(&spec, &mut |progress| {
        if let Progress::Downloading { bytes, .. } = progress {
            came = bytes;
            cancel.store(true, Ordering::Relaxed);
        }
    });
    assert!(matches!(stopped, Err(SourceError::Hub(HubError::Stopped))));
    assert_eq!(cache.models(), Vec::<PathBuf>::new());
    hub.asked();
    cache.get(&hub, "").unwrap();
    assert_eq!(hub.asked()[2].range, Some(format!("bytes={came}-")));
}

#[test]
fn two_at_once_download_once() {
    let (cache, bytes) = (Cache::new(), weights(900_000));
    let hub = Hub::with_files(&[("m.gguf", &bytes)]);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| cache.get(&hub, "")))
            .collect();
        for thread in threads {
            thread.join().unwrap().unwrap();
        }
    });
    assert_eq!(hub.asked().len(), 3);
}
