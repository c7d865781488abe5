//! What all chat APIs have in common of tools and of what is asked of an answer: functions, which
//! of them are to be called, and JSON schemas.

use serde_json::{Value, json};

use crate::chat::conversation::{Format, Tool, ToolChoice};
use crate::http::api_error::ApiError;
use crate::openai::fields::{Fields, wrong_type};

/// A function with its name, description and parameters.
///
/// # Errors
/// When the name is missing or a field has the wrong type.
pub fn read_function(function: &Fields<'_>, parameters: &str) -> Result<Tool, ApiError> {
    let name = function.text("name")?.filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| {
        let name = function.name("name");
        ApiError::param(&name, format!("{name} is missing; a tool needs it"))
    })?;
    let parameters = match function.get(parameters) {
        None => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(other) => return Err(wrong_type(&function.name(parameters), "an object", other)),
    };
    Ok(Tool {
        name: name.to_owned(),
        description: function.text("description")?.map(str::to_owned),
        parameters,
        namespace: None,
    })
}

/// OpenAI's `tool_choice`: a word, or an object that `named` reads.
///
/// # Errors
/// An unknown word, a value of another type, or what `named` refuses.
pub fn read_choice(
    fields: &Fields<'_>,
    named: impl FnOnce(&Fields<'_>) -> Result<ToolChoice, ApiError>,
) -> Result<ToolChoice, ApiError> {
    match fields.get("tool_choice") {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            other => {
                let other: String = other.chars().take(40).collect();
                let message =
                    format!("tool_choice must be auto, none or required, found {other:?}");
                Err(ApiError::param("tool_choice", message))
            }
        },
        Some(choice @ Value::Object(_)) => named(&Fields::at(choice, "tool_choice")?),
        Some(other) => Err(wrong_type("tool_choice", "a string or an object", other)),
    }
}

/// A forced call needs something to call.
///
/// # Errors
/// When there is no such tool.
pub fn check_choice(tools: &[Tool], choice: &ToolChoice) -> Result<(), ApiError> {
    let message = match choice {
        ToolChoice::Required if tools.is_empty() => {
            "tool_choice asks for a call and there are no tools".to_owned()
        }
        ToolChoice::Named(name) if tools.iter().all(|tool| tool.name != *name) => {
            let name: String = name.chars().take(80).collect();
            format!("tool_choice names the tool {name:?}, which is not among the tools")
        }
        ToolChoice::Auto | ToolChoice::None | ToolChoice::Required | ToolChoice::Named(_) => {
            return Ok(());
        }
    };
    Err(ApiError::param("tool_choice", message))
}

/// The `schema` of a format.
///
/// # Errors
/// When it is no object, or missing where there has to be one.
pub fn read_schema(format: &Fields<'_>) -> Result<Format, ApiError> {
    match format.get("schema") {
        Some(schema @ Value::Object(_)) => Ok(Format::Schema(schema.clone())),
        other => {
            let found = other.unwrap_or(&Value::Null);
            Err(wrong_type(&format.name("schema"), "an object", found))
        }
    }
}
