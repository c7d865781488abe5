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
}

impl FromStr for ModelSpec {
    type Err = SourceError;

    fn from_str(spec: &str) -> Result<Self, SourceError> {
        let Some(package) = spec.strip_prefix("pypi:") else {
            return match spec {
                "auto" => Ok(Self::Auto),
                "" => Err(SourceError::Spec {
                    spec: spec.to_owned(),
                }),
                path => Ok(Self::File(PathBuf::from(path))),
            };
        };
        let bad = || SourceError::Spec {
            spec: spec.to_owned(),
        };
        let (name, rest) = package.split_once("==").ok_or_else(bad)?;
        let (version, file) = match rest.split_once(':') {
            Some((version, file)) => (version, Some(file)),
            None => (rest, None),
        };
        let fits = is_word(name, "-._") && is_word(version, "-._+!");
        let file_fits = file.is_none_or(|file| {
            is_word(file, "-._+ ") && file.to_ascii_lowercase().ends_with(".gguf")
        });
        if !fits || !file_fits {
            return Err(bad());
        }
        let (name, version) = (name.to_owned(), version.to_owned());
        Ok(Self::Pypi(PypiFile {
            name,
            version,
            file: file.map(str::to_owned),
        }))
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
