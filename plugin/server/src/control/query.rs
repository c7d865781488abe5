//! Parameters of the control routes, as they stand behind the question mark.

use std::ops::RangeInclusive;

use crate::http::api_error::ApiError;

/// The value of a parameter, decoded; an empty one is none.
pub fn parameter(query: &str, name: &str) -> Option<String> {
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    let (_, value) = pairs.find(|(key, value)| key == name && !value.is_empty())?;
    Some(value.into_owned())
}

/// How many of something are wanted: `default` where nothing is said.
///
/// # Errors
/// No whole number, or one that is not possible.
pub fn limit(
    query: &str,
    default: usize,
    possible: RangeInclusive<usize>,
) -> Result<usize, ApiError> {
    bounded(query, "limit", default, possible)
}

/// A number with bounds: `default` where nothing is said.
///
/// # Errors
/// No whole number, or one that is not possible.
pub fn bounded(
    query: &str,
    name: &'static str,
    default: usize,
    possible: RangeInclusive<usize>,
) -> Result<usize, ApiError> {
    let Some(text) = parameter(query, name) else {
        return Ok(default);
    };
    let number = text.parse().ok().filter(|number| possible.contains(number));
    number.ok_or_else(|| {
        let (least, most) = possible.into_inner();
        let message = format!("{name} is {text:?}; {least} to {most} are possible");
        ApiError::param(name, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_decoded_and_an_empty_one_is_none() {
        let query = "session=agent%3Amain+1&id=&id=b&limit=7";
        let value = |name| parameter(query, name);
        assert_eq!(value("session").as_deref(), Some("agent:main 1"));
        assert_eq!(value("id").as_deref(), Some("b"));
        assert_eq!(value("other"), None);
        assert_eq!(limit(query, 3, 1..=9), Ok(7));
        assert_eq!(limit("", 3, 1..=9), Ok(3));
        for wrong in ["limit=0", "limit=10", "limit=many", "limit=-1"] {
            let error = limit(wrong, 3, 1..=9).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("limit"), "{wrong}");
        }
    }
}
