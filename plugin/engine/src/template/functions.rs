//! What Hugging Face's templates call beyond Jinja itself.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State};

/// The message of `raise_exception`, as the source of the error that ends the render.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

/// Writes a value as Python's Jinja does: `None`, `True` and `False` have capitals there.
pub(super) fn format_as_python(
    out: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    let word = match bool::try_from(value.clone()) {
        Ok(flag) if value.kind() == ValueKind::Bool => {
            if flag {
                "True"
            } else {
                "False"
            }
        }
        _ if value.is_none() => "None",
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(word).map_err(Error::from)
}

/// The test `iterable`: unlike minijinja's own, false for `none`, as in Python.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// `raise_exception(message)`: the template refuses the conversation.
pub(super) fn raise_exception(message: &str) -> Result<Value, Error> {
    let error = Error::new(ErrorKind::InvalidOperation, "raise_exception");
    Err(error.with_source(Raised(message.to_owned())))
}

/// `tojson` as Python writes JSON: `, ` and `: ` between, or lines with an indent; no character is
/// escaped that JSON does not force.
pub(super) fn to_json(
    value: &Value,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    for key in ["ensure_ascii", "sort_keys"] {
        if kwargs.get::<Option<bool>>(key)?.unwrap_or(false) {
            let detail = format!("tojson({key}=True) is not supported");
            return Err(Error::new(ErrorKind::InvalidOperation, detail));
        }
    }
    let indent = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get("indent")?,
    };
    kwargs.assert_all_used()?;
    let indent = indent.filter(|indent| !indent.is_none() && !indent.is_undefined());
    let none = Kwargs::from_iter(std::iter::empty::<(String, Value)>());
    let written = minijinja::filters::tojson(value, indent, none)?;
    Ok(Value::from(without_html_escapes(
        written.as_str().unwrap_or_default(),
    )))
}

/// Takes back the escapes that make JSON safe inside HTML: they stand only inside JSON strings,
/// where a backslash that is meant as one is doubled.
fn without_html_escapes(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let mut rest = json;
    while let Some(at) = rest.find('\\') {
        let (before, escape) = rest.split_at(at);
        out.push_str(before);
        let plain = match escape.get(..6) {
            Some("\\u003c") => Some("<"),
            Some("\\u003e") => Some(">"),
            Some("\\u0026") => Some("&"),
            Some("\\u0027") => Some("'"),
            _ => None,
        };
        // Other escapes are two characters as far as a second backslash could mislead.
        let (text, length) = match plain {
            Some(plain) => (plain, 6),
            None => (escape.get(..2).unwrap_or(escape), 2),
        };
        out.push_str(text);
        rest = escape.get(length..).unwrap_or_default();
    }
    out.push_str(rest);
    out
}

/// Turns the `{% generation %}` tags, which only mark what an answer is, into tags that change
/// nothing.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest.get(start..).and_then(|tag| tag.find("%}")) else {
            break;
        };
        let (before, tag) = rest.split_at(start);
        let (tag, after) = tag.split_at(length);
        let word = tag
            .trim_start_matches("{%")
            .trim_matches(['-', '+', ' ', '\n', '\t']);
        out.push_str(before);
        match word {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn html_escapes_are_taken_back_and_others_stay() {
        assert_eq!(
            without_html_escapes(r#""\u003ca\u003e \u0026 \u0027""#),
            r#""<a> & '""#
        );
        assert_eq!(
            without_html_escapes(r#""\\u003c \n \" \u00e9""#),
            r#""\\u003c \n \" \u00e9""#
        );
        assert_eq!(without_html_escapes(r#""\\\u003c""#), r#""\\<""#);
    }

    #[test]
    fn generation_tags_change_nothing_else() {
        let source = "{% if x %}{%- generation -%}a{%- endgeneration %}{% endif %}{{ generation }}";
        let plain = "{% if x %}{%- if true -%}a{%- endif %}{% endif %}{{ generation }}";
        assert_eq!(without_generation_tags(source), plain);
        assert_eq!(
            without_generation_tags("{% never closed"),
            "{% never closed"
        );
    }
}
