//! Reading fields of a JSON body with errors that name the field.
//!
//! One rule for all of them: `null` is the same as absent; a value of the wrong type or outside
//! its range is the caller's mistake and names the field, the limit and what was found.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::http::api_error::ApiError;

/// An object of the body together with the path that leads to it.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    /// The whole body.
    ///
    /// # Errors
    /// When the body is not a JSON object.
    pub fn root(body: &'a Value) -> Result<Fields<'a>, ApiError> {
        match body.as_object() {
            Some(map) => Ok(Fields {
                map,
                path: String::new(),
            }),
            None => Err(ApiError::new(
                crate::http::api_error::ErrorKind::BadRequest,
                format!("the body must be a JSON object, found {}", kind_of(body)),
            )),
        }
    }

    /// An object inside the body; `path` is what errors call it.
    ///
    /// # Errors
    /// When `value` is not an object.
    pub fn at(value: &'a Value, path: &str) -> Result<Fields<'a>, ApiError> {
        match value.as_object() {
            Some(map) => Ok(Fields {
                map,
                path: path.to_owned(),
            }),
            None => Err(wrong_type(path, "an object", value)),
        }
    }

    /// The full name of a field.
    pub fn name(&self, key: &str) -> String {
        if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        }
    }

    /// The field's value, unless absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// A bool.
    ///
    /// # Errors
    /// When the field is something else.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, ApiError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        value
            .as_bool()
            .map(Some)
            .ok_or_else(|| wrong_type(&self.name(key), "a boolean", value))
    }

    /// A string.
    ///
    /// # Errors
    /// When the field is something else.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, ApiError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        value
            .as_str()
            .map(Some)
            .ok_or_else(|| wrong_type(&self.name(key), "a string", value))
    }

    /// An integer in a range.
    ///
    /// # Errors
    /// When the field is not an integer or outside the range.
    pub fn integer(&self, key: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let name = self.name(key);
        let Some(number) = integer_of(value) else {
            return Err(wrong_type(&name, "an integer", value));
        };
        if range.contains(&number) {
            return Ok(Some(number));
        }
        let (low, high) = (range.start(), range.end());
        let limit = match (*low, *high) {
            (low, i64::MAX) => format!("at least {low}"),
            (low, high) => format!("from {low} to {high}"),
        };
        Err(ApiError::param(
            &name,
            format!("{name} must be {limit}, found {number}"),
        ))
    }

    /// A count that fits 32 bits.
    ///
    /// # Errors
    /// As [`Fields::integer`].
    pub fn count(&self, key: &str, range: RangeInclusive<u32>) -> Result<Option<u32>, ApiError> {
        let high = match *range.end() {
            u32::MAX => i64::MAX,
            high => i64::from(high),
        };
        let number = self.integer(key, i64::from(*range.start())..=high)?;
        Ok(number.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
    }

    /// A finite number in a range.
    ///
    /// # Errors
    /// When the field is not a number or outside the range.
    pub fn number(&self, key: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let name = self.name(key);
        let Some(number) = value.as_f64() else {
            return Err(wrong_type(&name, "a number", value));
        };
        if !range.contains(&number) {
            let (low, high) = (range.start(), range.end());
            let message = format!("{name} must be from {low} to {high}, found {number}");
            return Err(ApiError::param(&name, message));
        }
        #[expect(
            clippy::cast_possible_truncation,
            reason = "in range; f32 precision is enough"
        )]
        Ok(Some(number as f32))
    }

    /// A list.
    ///
    /// # Errors
    /// When the field is something else.
    pub fn list(&self, key: &str) -> Result<Option<&'a [Value]>, ApiError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_array() {
            Some(list) => Ok(Some(list.as_slice())),
            None => Err(wrong_type(&self.name(key), "a list", value)),
        }
    }
}

/// The error for a value of the wrong type.
pub fn wrong_type(name: &str, wanted: &str, found: &Value) -> ApiError {
    ApiError::param(
        name,
        format!("{name} must be {wanted}, found {}", kind_of(found)),
    )
}

/// `5` and `5.0` are integers, `5.5` and `"5"` are not.
fn integer_of(value: &Value) -> Option<i64> {
    if let Some(number) = value.as_i64() {
        return Some(number);
    }
    if value.is_u64() {
        return Some(i64::MAX);
    }
    let number = value.as_f64()?;
    #[expect(
        clippy::cast_possible_truncation,
        reason = "whole and below 2^53 by the guard"
    )]
    (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64)
}

fn kind_of(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(flag) => format!("the boolean {flag}"),
        Value::Number(number) => format!("the number {number}"),
        Value::String(text) => {
            let head: String = text.chars().take(40).collect();
            format!("the string {head:?}")
        }
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn null_is_absent_for_every_reader() {
        let body = json!({"x": null});
        let fields = Fields::root(&body).unwrap();
        assert_eq!(fields.flag("x").unwrap(), None);
        assert_eq!(fields.text("x").unwrap(), None);
        assert_eq!(fields.integer("x", 0..=1).unwrap(), None);
        assert_eq!(fields.number("x", 0.0..=1.0).unwrap(), None);
        assert!(fields.list("x").unwrap().is_none());
    }

    #[test]
    fn a_wrong_value_names_field_limit_and_finding() {
        let body = json!({"n": 0, "t": "warm", "s": 7, "f": 1.5});
        let fields = Fields::root(&body).unwrap();
        let error = fields.count("n", 1..=16).unwrap_err();
        assert_eq!(error.message, "n must be from 1 to 16, found 0");
        assert_eq!(error.param.as_deref(), Some("n"));
        let error = fields.number("t", 0.0..=2.0).unwrap_err();
        assert_eq!(
            error.message,
            "t must be a number, found the string \"warm\""
        );
        assert!(
            fields
                .text("s")
                .unwrap_err()
                .message
                .contains("the number 7")
        );
        assert!(fields.integer("f", 0..=9).is_err());
    }

    #[test]
    fn whole_floats_and_huge_integers_are_read_without_overflow() {
        let body = json!({"a": 16.0, "b": u64::MAX, "c": -1e300});
        let fields = Fields::root(&body).unwrap();
        assert_eq!(fields.integer("a", 1..=99).unwrap(), Some(16));
        assert_eq!(fields.count("b", 1..=u32::MAX).unwrap(), Some(u32::MAX));
        assert!(fields.integer("c", i64::MIN..=i64::MAX).is_err());
    }

    #[test]
    fn a_body_that_is_no_object_is_the_callers_mistake() {
        assert!(
            Fields::root(&json!([1]))
                .unwrap_err()
                .message
                .contains("a list")
        );
    }
}
