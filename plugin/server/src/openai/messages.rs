//! The messages and tools of a chat request, checked and brought into the one form that chat
//! templates expect: `content` as a string, tool arguments as objects, `system` for `developer`.
//! Nothing is moved: a system message in the middle of a conversation stays there.

use serde_json::Value;

use crate::chat::conversation::{Conversation, Format, Tool, ToolChoice};
use crate::chat::message::{Draft, Others, read_arguments, read_role, read_text};
use crate::chat::tools::{check_choice, read_choice, read_function, read_schema};
use crate::http::api_error::ApiError;
use crate::openai::fields::{Fields, wrong_type};

const ROLES: [&str; 6] = [
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];
const ALLOWED: &str = "system, developer, user, assistant or tool";

/// Reads the conversation of a chat request.
///
/// # Errors
/// The first field that is wrong.
pub fn read(fields: &Fields<'_>) -> Result<Conversation, ApiError> {
    let (tools, choice) = read_tools(fields)?;
    let mut talk = Conversation {
        messages: read_messages(fields)?,
        tools,
        choice,
        single_call: fields.flag("parallel_tool_calls")? == Some(false),
        format: read_format(fields)?,
        ..Conversation::default()
    };
    for key in ["chat_template_kwargs", "chat_template_args"] {
        match fields.get(key) {
            Some(Value::Object(args)) => talk.template_args.clone_from(args),
            Some(other) => return Err(wrong_type(key, "an object", other)),
            None => {}
        }
    }
    talk.canonical_ids();
    Ok(talk)
}

/// Reads `messages`.
///
/// # Errors
/// When the list is missing or empty, or a message is wrong.
pub fn read_messages(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let list = fields.list("messages")?.unwrap_or_default();
    if list.is_empty() {
        return Err(ApiError::param(
            "messages",
            "messages must have at least 1 entry, found none",
        ));
    }
    let read = |(index, message)| read_message(message, &format!("messages[{index}]"));
    list.iter().enumerate().map(read).collect()
}

fn read_message(message: &Value, path: &str) -> Result<Value, ApiError> {
    let fields = Fields::at(message, path)?;
    let role = read_role(&fields, &ROLES, ALLOWED)?;
    let mut draft = Draft::new(role);
    match fields.list("tool_calls")? {
        Some(calls) if role == "assistant" => read_calls(calls, path, &mut draft)?,
        Some(_) | None => {}
    }
    match fields.get("content") {
        Some(content) => draft.say(&read_text(
            content,
            &fields.name("content"),
            Others::Refused,
        )?),
        // An assistant turn may be calls alone, or nothing at all.
        None if role == "assistant" => {}
        None => {
            let name = fields.name("content");
            let message = format!("{name} is missing; only an assistant message may have none");
            return Err(ApiError::param(name, message));
        }
    }
    // OpenAI's name for it, and the one that some servers have for the same.
    for key in ["reasoning_content", "reasoning"] {
        if let Some(thoughts) = fields.get(key).and_then(Value::as_str) {
            draft.think(thoughts);
            break;
        }
    }
    let mut out = draft.take();
    for key in ["name", "tool_call_id"] {
        if let Some(text) = fields.text(key)? {
            out[key] = text.into();
        }
    }
    Ok(out)
}

fn read_calls(calls: &[Value], path: &str, draft: &mut Draft) -> Result<(), ApiError> {
    for (index, call) in calls.iter().enumerate() {
        let path = format!("{path}.tool_calls[{index}]");
        let fields = Fields::at(call, &path)?;
        let function = fields.get("function").unwrap_or(&Value::Null);
        let function = Fields::at(function, &format!("{path}.function"))?;
        let name = function.text("name")?.ok_or_else(|| {
            let name = function.name("name");
            ApiError::param(&name, format!("{name} is missing; a tool call needs it"))
        })?;
        let arguments = read_arguments(function.get("arguments"));
        draft.call(fields.text("id")?.unwrap_or_default(), name, arguments);
    }
    Ok(())
}

/// The function tools, in the caller's order, and what is to be called of them.
///
/// # Errors
/// When a tool is malformed, or the choice names no tool.
pub fn read_tools(fields: &Fields<'_>) -> Result<(Vec<Tool>, ToolChoice), ApiError> {
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
        tools.push(read_function(
            &Fields::at(function, &function_path)?,
            "parameters",
        )?);
    }
    let choice = read_choice(fields, |choice| {
        let function = choice.get("function").unwrap_or(&Value::Null);
        let function = Fields::at(function, "tool_choice.function")?;
        let name = function.text("name")?.unwrap_or_default();
        Ok(ToolChoice::Named(name.to_owned()))
    })?;
    check_choice(&tools, &choice)?;
    Ok((tools, choice))
}

/// What the text of the answer has to be: `response_format`, or vLLM's names for the same.
///
/// # Errors
/// An unknown type, or a schema that is none.
fn read_format(fields: &Fields<'_>) -> Result<Format, ApiError> {
    for key in ["functions", "function_call"] {
        if fields.get(key).is_some() {
            let message =
                format!("{key} is the former name of tools and is not supported; use tools");
            return Err(ApiError::unsupported(key, message));
        }
    }
    if let Some(format) = fields.get("response_format") {
        return read_response_format(&Fields::at(format, "response_format")?);
    }
    if let Some(wanted) = fields.get("structured_outputs") {
        let wanted = Fields::at(wanted, "structured_outputs")?;
        return read_guided(&wanted, "json", "regex", "choice");
    }
    read_guided(fields, "guided_json", "guided_regex", "guided_choice")
}

fn read_response_format(format: &Fields<'_>) -> Result<Format, ApiError> {
    match format.text("type")? {
        Some("text") | None => Ok(Format::Text),
        Some("json_object") => Ok(Format::JsonObject),
        Some("json_schema") => {
            let schema = format.get("json_schema").unwrap_or(&Value::Null);
            let schema = Fields::at(schema, "response_format.json_schema")?;
            if schema.get("schema").is_none() {
                // A name alone asks for JSON of any shape.
                return Ok(Format::JsonObject);
            }
            read_schema(&schema)
        }
        Some("regex") => Ok(Format::Regex(
            format.text("pattern")?.unwrap_or(".*").to_owned(),
        )),
        Some(other) => {
            let other: String = other.chars().take(40).collect();
            let message = format!(
                "response_format.type must be text, json_object, json_schema or regex, \
                 found {other:?}"
            );
            Err(ApiError::param("response_format.type", message))
        }
    }
}

fn read_guided(
    fields: &Fields<'_>,
    json: &str,
    regex: &str,
    choice: &str,
) -> Result<Format, ApiError> {
    match fields.get(json) {
        Some(schema @ Value::Object(_)) => return Ok(Format::Schema(schema.clone())),
        Some(Value::String(text)) => {
            let schema = serde_json::from_str(text).ok().filter(Value::is_object);
            let name = fields.name(json);
            let message = || ApiError::param(&name, format!("{name} is no JSON object"));
            return schema.map(Format::Schema).ok_or_else(message);
        }
        Some(other) => return Err(wrong_type(&fields.name(json), "an object", other)),
        None => {}
    }
    if let Some(pattern) = fields.text(regex)? {
        return Ok(Format::Regex(pattern.to_owned()));
    }
    let Some(choices) = fields.list(choice)? else {
        return Ok(Format::Text);
    };
    let name = fields.name(choice);
    let texts: Option<Vec<String>> = choices.iter().map(|v| v.as_str().map(escaped)).collect();
    match texts {
        Some(texts) if !texts.is_empty() => Ok(Format::Regex(texts.join("|"))),
        Some(_) | None => Err(ApiError::param(
            &name,
            format!("{name} must be a list of strings, at least 1"),
        )),
    }
}

/// A text as the pattern that matches it and nothing else.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_ascii_punctuation() {
            out.push('\\');
        }
        out.push(character);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(messages: Value) -> Result<Value, ApiError> {
        let body = json!({"messages": messages});
        read_messages(&Fields::root(&body).unwrap()).map(Value::Array)
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
    fn formats_are_read_by_all_their_names() {
        let format = |body: Value| read_format(&Fields::root(&body).unwrap()).unwrap();
        let schema = json!({"type": "object"});
        for body in [
            json!({"response_format": {"type": "json_schema",
                "json_schema": {"name": "x", "schema": schema}}}),
            json!({"guided_json": schema}),
            json!({"guided_json": schema.to_string()}),
            json!({"structured_outputs": {"json": schema}}),
        ] {
            assert_eq!(format(body), Format::Schema(schema.clone()));
        }
        assert_eq!(format(json!({})), Format::Text);
        let choice = json!({"guided_choice": ["a.b", "c"]});
        assert_eq!(format(choice), Format::Regex("a\\.b|c".into()));
        let unknown = json!({"response_format": {"type": "xml"}});
        assert!(read_format(&Fields::root(&unknown).unwrap()).is_err());
    }

    #[test]
    fn foreign_tool_kinds_are_left_out_and_none_hides_all() {
        let function = json!({"type": "function", "function": {"name": "f"}});
        let body = json!({"messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "web_search"}, function]});
        let talk = super::read(&Fields::root(&body).unwrap()).unwrap();
        assert_eq!(talk.callable().len(), 1);
        let body = json!({"messages": [{"role": "user", "content": "x"}],
            "tools": [function], "tool_choice": "none"});
        let talk = super::read(&Fields::root(&body).unwrap()).unwrap();
        assert!(talk.callable().is_empty());
        let body = json!({"tools": [{"type": "function", "function": {}}]});
        let error = read_tools(&Fields::root(&body).unwrap()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("tools[0].function.name"));
    }

    #[test]
    fn a_choice_must_name_a_tool_that_is_there() {
        let body = json!({"tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}}});
        let error = read_tools(&Fields::root(&body).unwrap()).unwrap_err();
        assert!(error.message.contains("\"g\""), "{}", error.message);
        let body = json!({"tool_choice": "required"});
        assert!(read_tools(&Fields::root(&body).unwrap()).is_err());
    }
}
