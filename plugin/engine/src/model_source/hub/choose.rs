//! Which file of a repository is the model: the one that is named; else the only one; else the only
//! one of the type that most repositories are downloaded in.

use super::http::{Listed, Listing};
use super::{HubError, HubFile};

/// The weight type that is taken where there are several.
const USUAL: &str = "q4_k_m";

/// Names in an error, at most.
const NAMES_MAX: usize = 40;

/// The file to download.
pub(super) fn choose(listing: &Listing, wanted: &HubFile) -> Result<Listed, HubError> {
    let repository = wanted.repository();
    if let Some(file) = wanted.file() {
        let found = listing.models().find(|listed| listed.path == file);
        let found = found.ok_or_else(|| HubError::NoFile {
            repository,
            wanted: file.to_owned(),
            found: names(listing.models()),
        })?;
        return match is_split(&found.path) {
            false => Ok(found.clone()),
            true => Err(HubError::Split {
                file: found.path.clone(),
            }),
        };
    }
    let whole: Vec<&Listed> = listing
        .models()
        .filter(|listed| !is_split(&listed.path) && !is_projector(&listed.path))
        .collect();
    let is_usual = |listed: &&Listed| listed.path.to_ascii_lowercase().contains(USUAL);
    let usual: Vec<&Listed> = whole.iter().copied().filter(is_usual).collect();
    match (whole.as_slice(), usual.as_slice()) {
        ([only], _) | (_, [only]) => Ok((*only).clone()),
        ([], _) => Err(HubError::NoFile {
            repository,
            wanted: "*.gguf in one part".to_owned(),
            found: names(listing.models()),
        }),
        _ => Err(HubError::Ambiguous {
            repository,
            found: names(whole.iter().copied()),
        }),
    }
}

fn names<'a>(files: impl Iterator<Item = &'a Listed>) -> String {
    let all: Vec<&str> = files.map(|listed| listed.path.as_str()).collect();
    match all.len() {
        0 => "none".to_owned(),
        len if len > NAMES_MAX => {
            let some = all.get(..NAMES_MAX).unwrap_or_default().join(", ");
            format!("{some} and {} more", len - NAMES_MAX)
        }
        _ => all.join(", "),
    }
}

/// Whether a name ends in `-00001-of-00003.gguf`.
fn is_split(path: &str) -> bool {
    let stem = path.get(..path.len().saturating_sub(5)).unwrap_or_default();
    let number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut parts = stem.rsplitn(3, '-');
    let (of, word) = (parts.next(), parts.next());
    let part = parts.next().and_then(|rest| rest.rsplit('-').next());
    word == Some("of") && of.is_some_and(number) && part.is_some_and(number)
}

/// Whether a file is what turns pictures or sound into tokens, beside a model.
fn is_projector(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.to_ascii_lowercase().contains("mmproj")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(files: &[&str], wanted: Option<&str>) -> Result<String, String> {
        let files = files.iter().map(|path| Listed {
            path: (*path).to_owned(),
            bytes: None,
            sha256: None,
        });
        let listing = Listing {
            commit: None,
            files: files.collect(),
        };
        let file = wanted.map_or_else(String::new, |file| format!(":{file}"));
        let spec = format!("hf:a/b{file}").parse().expect("a model");
        let crate::model_source::ModelSpec::Hub(spec) = spec else {
            panic!("a repository")
        };
        let found = choose(&listing, &spec).map_err(|error| error.to_string());
        found.map(|listed| listed.path)
    }

    #[test]
    fn the_only_model_is_taken_beside_projectors_parts_and_other_files() {
        let files = [
            "README.md",
            "mmproj-m-f16.gguf",
            "big-00001-of-00002.gguf",
            "sub/m-Q8_0.gguf",
        ];
        assert_eq!(chosen(&files, None).as_deref(), Ok("sub/m-Q8_0.gguf"));
        assert_eq!(
            chosen(&files, Some("mmproj-m-f16.gguf")).as_deref(),
            Ok("mmproj-m-f16.gguf"),
            "what is named is taken"
        );
    }

    #[test]
    fn of_several_the_usual_one_is_taken_and_without_it_they_are_listed() {
        let files = ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-F16.gguf"];
        assert_eq!(chosen(&files, None).as_deref(), Ok("m-Q4_K_M.gguf"));
        let error = chosen(&["m-Q8_0.gguf", "m-F16.gguf"], None).unwrap_err();
        assert!(error.contains("m-Q8_0.gguf, m-F16.gguf"), "{error}");
        assert!(error.contains("hf:a/b:FILE"), "{error}");
        let two = ["a-q4_k_m.gguf", "b-q4_k_m.gguf"];
        assert!(chosen(&two, None).unwrap_err().contains("several"));
    }

    #[test]
    fn parts_and_missing_files_are_refused_by_name() {
        let parts = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
        let error = chosen(&parts, None).unwrap_err();
        assert!(error.contains("m-00002-of-00002.gguf"), "{error}");
        let error = chosen(&parts, Some(parts[0])).unwrap_err();
        assert!(error.contains("one part"), "{error}");
        let error = chosen(&["m-1-of-2.gguf"], Some("n.gguf")).unwrap_err();
        assert!(error.contains("no file n.gguf") && error.contains("m-1-of-2"));
        assert_eq!(
            chosen(&["m-1-of-2.gguf"], None).as_deref(),
            Ok("m-1-of-2.gguf")
        );
        assert!(chosen(&["README.md"], None).unwrap_err().contains("none"));
        let many: Vec<String> = (0..60).map(|number| format!("m{number}.gguf")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(chosen(&many, None).unwrap_err().ends_with("and 20 more"));
    }
}
