//! The messages and tools of a chat request, checked and brought into the one form that chat
//! templates expect: `content` as a string, tool arguments as objects, `system` for `developer`.
//! Nothing is moved: a system message in the middle of a conversation stays there.

use serde_json::{Map, Value, json};

use crate::http::api_error::ApiError;
use crate::openai::fields::{Fields, wrong_type};

const ROLES: &str = "system, developer, user, assistant or tool";

/// Reads `messages`.
///
/// # Errors
/// When the list is missing or empty, or a message is wrong.
pub fn read_messages(fields: &Fields<'_>) -> Result<Value, ApiError> {
    let list = fields.list("messages")?.unwrap_or_default();
    if list.is_empty() {
        return Err(ApiError::param(
            "messages",
            "messages must have at least 1 entry, found none",
        ));
    }
    let read = |(index, message)| read_message(message, &format!("messages[{index}]"));
    list.iter()
        .enumerate()
        .map(read)
        .collect::<Result<Vec<_>, _>>()
        .map(Value::Array)
}

fn read_message(message: &Value, path: &str) -> Result<Value, ApiError> {
    let fields = Fields::at(message, path)?;
    let role = match fields.text("role")? {
        Some("developer") => "system",
        Some("function") => "tool",
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        Some(role) => {
            let role: String = role.chars().take(40).collect();
            let message = format!("role must be {ROLES}, found {role:?}");
            return Err(ApiError::param(fields.name("role"), message));
        }
        None => {
            let name = fields.name("role");
            return Err(ApiError::param(
                &name,
                format!("{name} is missing; it must be {ROLES}"),
            ));
        }
    };
    let calls = match fields.list("tool_calls")? {
        Some(calls) if role == "assistant" => read_calls(calls, path)?,
        Some(_) | None => Vec::new(),
    };
    let content = match fields.get("content") {
        Some(content) => read_content(content, &fields.name("content"))?,
        // An assistant turn may be calls alone, or nothing at all.
        None if role == "assistant" => String::new(),
        None => {
            let name = fields.name("content");
            let message = format!("{name} is missing; only an assistant message may have none");
            return Err(ApiError::param(name, message));
        }
    };
    let mut out = Map::new();
    out.insert("role".into(), role.into());
    out.insert("content".into(), content.into());
    if !calls.is_empty() {
        out.insert("tool_calls".into(), calls.into());
    }
    for key in ["name", "tool_call_id", "reasoning_content"] {
        if let Some(text) = fields.text(key)? {
            out.insert(key.into(), text.into());
        }
    }
    Ok(Value::Object(out))
}

/// A string, or text parts, which are joined by line breaks.
fn read_content(content: &Value, name: &str) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            return Err(wrong_type(
                name,
                "a string or a list of text parts",
                content,
            ));
        }
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let path = format!("{name}[{index}]");
        if let Some(text) = part.as_str() {
            texts.push(text);
            continue;
        }
        let fields = Fields::at(part, &path)?;
        match fields.text("type")? {
            Some("text" | "input_text" | "output_text") | None => {}
            Some("refusal") => {
                texts.push(fields.text("refusal")?.unwrap_or_default());
                continue;
            }
            Some(other) => {
                let other: String = other.chars().take(40).collect();
                let message = format!("this model reads text only, found a part of type {other:?}");
                return Err(ApiError::unsupported(fields.name("type"), message));
            }
        }
        let text = fields.text("text")?;
        texts.push(text.ok_or_else(|| {
            let name = fields.name("text");
            ApiError::param(&name, format!("{name} is missing; a text part needs it"))
        })?);
    }
    Ok(texts.join("\n"))
}

fn read_calls(calls: &[Value], path: &str) -> Result<Vec<Value>, ApiError> {
    let mut out = Vec::with_capacity(calls.len());
    for (index, call) in calls.iter().enumerate() {
        let path = format!("{path}.tool_calls[{index}]");
        let fields = Fields::at(call, &path)?;
        let function = fields.get("function").unwrap_or(&Value::Null);
        let function_path = format!("{path}.function");
        let function = Fields::at(function, &function_path)?;
        let name = function.text("name")?.ok_or_else(|| {
            let name = function.name("name");
            ApiError::param(&name, format!("{name} is missing; a tool call needs it"))
        })?;
        let mut read = json!({
            "type": "function",
            "function": {"name": name, "arguments": read_arguments(function.get("arguments"))},
        });
        if let Some(id) = fields.text("id")? {
            read["id"] = id.into();
        }
        out.push(read);
    }
    Ok(out)
}

/// Clients send arguments as JSON text in a spacing of their own; templates print objects in one
/// spacing. What is not the text of an object stays as it came.
fn read_arguments(arguments: Option<&Value>) -> Value {
    let Some(arguments) = arguments else {
        return json!({});
    };
    let parsed = arguments
        .as_str()
        .and_then(|text| serde_json::from_str::<Value>(text).ok());
    parsed
        .filter(Value::is_object)
        .unwrap_or_else(|| arguments.clone())
}

/// The tools to render into the prompt: function tools, in the caller's order. `None` when there
/// are none or `tool_choice` is `none`.
///
/// # Errors
/// When a tool is malformed, or `tool_choice` asks for a forced call.
pub fn read_tools(fields: &Fields<'_>) -> Result<Option<Value>, ApiError> {
    let forced = "a forced tool call needs constrained decoding, which is not supported yet; \
                  use \"auto\" or \"none\"";
    let wanted = match fields.get("tool_choice") {
        None => true,
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => true,
            "none" => false,
            "required" => return Err(ApiError::unsupported("tool_choice", forced)),
            other => {
                let other: String = other.chars().take(40).collect();
                let message =
                    format!("tool_choice must be auto, none or required, found {other:?}");
                return Err(ApiError::param("tool_choice", message));
            }
        },
        Some(Value::Object(_)) => return Err(ApiError::unsupported("tool_choice", forced)),
        Some(other) => return Err(wrong_type("tool_choice", "a string or an object", other)),
    };
    let mut tools = Vec::new();
    for (index, tool) in fields.list("tools")?.unwrap_or_default().iter().enumerate() {
        let path = format!("tools[{index}]");
        let tool_fields = Fields::at(tool, &path)?;
        // Hosted tools of other vendors are no business of this model: they are left out.
        if tool_fields
            .text("type")?
            .is_some_and(|kind| kind != "function")
        {
            continue;
        }
        let function_path = format!("{path}.function");
        let function = tool_fields.get("function").unwrap_or(&Value::Null);
        let function = Fields::at(function, &function_path)?;
        if function.text("name")?.is_none_or(str::is_empty) {
            let name = function.name("name");
            return Err(ApiError::param(
                &name,
                format!("{name} is missing; a tool needs it"),
            ));
        }
        tools.push(tool.clone());
    }
    Ok((wanted && !tools.is_empty()).then_some(Value::Array(tools)))
}

/// Refuses what needs constrained decoding or other models.
///
/// # Errors
/// `Unsupported`, naming the field.
pub fn check_supported(fields: &Fields<'_>) -> Result<(), ApiError> {
    if let Some(format) = fields.get("response_format") {
        let format = Fields::at(format, "response_format")?;
        match format.text("type")? {
            Some("text") | None => {}
            Some(kind @ ("json_object" | "json_schema")) => {
                let message = format!(
                    "response_format {kind} needs constrained decoding, which is not supported \
                     yet; use \"text\""
                );
                return Err(ApiError::unsupported("response_format", message));
            }
            Some(other) => {
                let other: String = other.chars().take(40).collect();
                let message = format!(
                    "response_format.type must be text, json_object or json_schema, found {other:?}"
                );
                return Err(ApiError::param("response_format.type", message));
            }
        }
    }
    for key in ["functions", "function_call"] {
        if fields.get(key).is_some() {
            let message =
                format!("{key} is the former name of tools and is not supported; use tools");
            return Err(ApiError::unsupported(key, message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(messages: Value) -> Result<Value, ApiError> {
        let body = json!({"messages": messages});
        read_messages(&Fields::root(&body).unwrap())
    }

    fn param(messages: Value) -> String {
        read(messages).unwrap_err().param.unwrap()
    }

    #[test]
    fn developer_is_system_and_stays_in_its_place() {
        let out = read(json!([
            {"role": "user", "content": "a"},
            {"role": "developer", "content": "b"},
        ]));
        let wanted = json!([
            {"role": "user", "content": "a"},
            {"role": "system", "content": "b"},
        ]);
        assert_eq!(out.unwrap(), wanted);
    }

    #[test]
    fn an_assistant_turn_may_be_tool_calls_alone() {
        let call = json!({"id": "c1", "type": "function",
            "function": {"name": "f", "arguments": "{\"b\":1, \"a\" : [2]}"}});
        let out = read(json!([{"role": "assistant", "content": null, "tool_calls": [call]}]));
        let out = out.unwrap();
        assert_eq!(out[0]["content"], "");
        let arguments = &out[0]["tool_calls"][0]["function"]["arguments"];
        assert_eq!(
            arguments.to_string(),
            "{\"b\":1,\"a\":[2]}",
            "key order is kept"
        );
    }

    #[test]
    fn arguments_that_are_no_object_stay_as_they_came() {
        assert_eq!(read_arguments(Some(&json!("not json"))), json!("not json"));
        assert_eq!(read_arguments(Some(&json!("[1]"))), json!("[1]"));
        assert_eq!(read_arguments(None), json!({}));
    }

    #[test]
    fn text_parts_become_one_string() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        assert_eq!(
            read(json!([{"role": "tool", "content": parts}])).unwrap()[0]["content"],
            "a\nb"
        );
        let image = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
        let error = read(json!([{"role": "user", "content": image}])).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages[0].content[0].type"));
        assert!(error.message.contains("text only"));
    }

    #[test]
    fn mistakes_name_the_message() {
        assert_eq!(param(json!([])), "messages");
        assert_eq!(param(json!(null)), "messages");
        assert_eq!(param(json!("hi")), "messages");
        assert_eq!(param(json!(["hi"])), "messages[0]");
        assert_eq!(param(json!([{"content": "x"}])), "messages[0].role");
        assert_eq!(
            param(json!([{"role": "robot", "content": "x"}])),
            "messages[0].role"
        );
        assert_eq!(param(json!([{"role": "user"}])), "messages[0].content");
        assert_eq!(
            param(json!([{"role": "user", "content": 5}])),
            "messages[0].content"
        );
        assert_eq!(
            param(json!([{"role": "assistant", "tool_calls": [{}]}])),
            "messages[0].tool_calls[0].function"
        );
    }

    #[test]
    fn forced_calls_and_schemas_are_refused_as_not_yet_supported() {
        for body in [
            json!({"tool_choice": "required"}),
            json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ] {
            let error = read_tools(&Fields::root(&body).unwrap()).unwrap_err();
            assert!(
                error.message.contains("not supported yet"),
                "{}",
                error.message
            );
        }
        let body = json!({"response_format": {"type": "json_schema", "json_schema": {}}});
        let error = check_supported(&Fields::root(&body).unwrap()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("response_format"));
        let body = json!({"response_format": {"type": "text"}});
        assert!(check_supported(&Fields::root(&body).unwrap()).is_ok());
    }

    #[test]
    fn foreign_tool_kinds_are_left_out_and_none_hides_all() {
        let function = json!({"type": "function", "function": {"name": "f"}});
        let body = json!({"tools": [{"type": "web_search"}, function]});
        let tools = read_tools(&Fields::root(&body).unwrap()).unwrap().unwrap();
        assert_eq!(tools.as_array().unwrap().len(), 1);
        let body = json!({"tools": [function], "tool_choice": "none"});
        assert!(read_tools(&Fields::root(&body).unwrap()).unwrap().is_none());
        let body = json!({"tools": [{"type": "function", "function": {}}]});
        let error = read_tools(&Fields::root(&body).unwrap()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("tools[0].function.name"));
    }
}
