//! `--device` on a machine that lacks it: one clear line and an exit code, before a model is
//! looked for.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::process::Command;

fn serve(device: &str) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_rootstock"))
        .args([
            "serve",
            "--port",
            "0",
            "--model",
            "/nowhere.gguf",
            "--device",
            device,
        ])
        // A driver that is there must not be found, so that the answer is the same everywhere.
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), text)
}

#[cfg(feature = "cuda")]
#[test]
fn cuda_without_a_device_is_one_line_and_an_exit_code() {
    let (code, text) = serve("cuda");
    assert_eq!(code, Some(1), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    let head = "rootstock: cannot start the engine: no CUDA device: ";
    assert!(text.starts_with(head), "{text}");
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_without_a_device_are_not_measured() {
    let output = Command::new(env!("CARGO_BIN_EXE_rootstock"))
        .args(["bench", "kernels"])
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("rootstock: no CUDA device: "), "{text}");
    assert!(output.stdout.is_empty());
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_program_without_cuda_says_so() {
    let (code, text) = serve("cuda");
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("built without CUDA"), "{text}");
}

#[test]
fn a_device_that_is_no_name_is_refused_with_the_names() {
    let (code, text) = serve("gpu");
    assert_ne!(code, Some(0));
    assert!(
        text.contains("--device is gpu; cpu, cuda, cuda:N or auto"),
        "{text}"
    );
}

#[test]
fn auto_goes_on_without_a_device() {
    // As far as to the model, which is not there.
    let (code, text) = serve("auto");
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("nowhere.gguf"), "{text}");
}
