//! The body of `/v1/responses`.

use crate::chat::conversation::{Conversation, Format, Tool, ToolChoice};
use crate::chat::tools::{check_choice, read_choice, read_function, read_schema};
use crate::http::api_error::ApiError;
use crate::openai::ask::{Ask, random_seed};
use crate::openai::fields::Fields;
use rootstock::scheduler::SamplingParams;

/// The names by which the model knows tools of namespaces, and what clients call them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// The model's name, the bare name, the namespace.
    list: Vec<(String, String, String)>,
}

impl Names {
    /// The model's name of a tool.
    pub fn shown<'a>(&'a self, bare: &'a str, namespace: Option<&str>) -> &'a str {
        let is_it = |(_, name, space): &&(String, String, String)| {
            name == bare && namespace == Some(space.as_str())
        };
        let found = self.list.iter().find(is_it);
        found.map_or(bare, |(shown, _, _)| shown.as_str())
    }

    /// The bare name and the namespace of what the model calls by a name.
    pub fn bare<'a>(&'a self, shown: &'a str) -> (&'a str, Option<&'a str>) {
        let found = self.list.iter().find(|(name, _, _)| name == shown);
        found.map_or((shown, None), |(_, bare, space)| (bare, Some(space)))
    }
}

/// Function tools, those of namespaces among them; tools that others host are left out.
///
/// # Errors
/// A malformed tool.
pub fn read_tools(fields: &Fields<'_>) -> Result<(Vec<Tool>, Names), ApiError> {
    let (mut tools, mut names) = (Vec::<Tool>::new(), Names::default());
    for (index, tool) in fields.list("tools")?.unwrap_or_default().iter().enumerate() {
        let tool = Fields::at(tool, &format!("tools[{index}]"))?;
        match tool.text("type")? {
            Some("function") | None => tools.push(read_function(&tool, "parameters")?),
            Some("namespace") => {
                let space = tool.text("name")?.unwrap_or_default();
                let path = tool.name("tools");
                let nested = tool.list("tools")?.unwrap_or_default();
                for (index, inner) in nested.iter().enumerate() {
                    let inner = Fields::at(inner, &format!("{path}[{index}]"))?;
                    if inner.text("type")?.is_some_and(|kind| kind != "function") {
                        continue;
                    }
                    let mut inner = read_function(&inner, "parameters")?;
                    let bare = inner.name.clone();
                    if tools.iter().any(|tool| tool.name == bare) {
                        inner.name = format!("{space}__{bare}");
                    }
                    names
                        .list
                        .push((inner.name.clone(), bare, space.to_owned()));
                    inner.namespace = Some(space.to_owned());
                    tools.push(inner);
                }
            }
            Some(_) => {}
        }
    }
    Ok((tools, names))
}

/// Everything about the answer but its messages.
///
/// # Errors
/// The first field that is wrong.
pub fn read_talk(fields: &Fields<'_>, tools: Vec<Tool>) -> Result<Conversation, ApiError> {
    let choice = read_choice(fields, read_named)?;
    check_choice(&tools, &choice)?;
    Ok(Conversation {
        tools,
        choice,
        single_call: fields.flag("parallel_tool_calls")? == Some(false),
        format: read_format(fields)?,
        thinking: read_thinking(fields)?,
        ..Conversation::default()
    })
}

/// How to generate.
///
/// # Errors
/// The first field that is wrong.
pub fn read_ask(fields: &Fields<'_>) -> Result<Ask, ApiError> {
    let off = SamplingParams::default();
    let temperature = fields.number("temperature", 0.0..=2.0)?;
    let sampling = SamplingParams {
        temperature: temperature.unwrap_or(off.temperature),
        top_p: fields.number("top_p", 0.0..=1.0)?.unwrap_or(off.top_p),
        seed: random_seed(),
        ..off
    };
    Ok(Ask {
        model: fields
            .text("model")?
            .filter(|name| !name.is_empty())
            .map(str::to_owned),
        n: 1,
        stream: fields.flag("stream")?.unwrap_or(false),
        include_usage: true,
        max_tokens: fields.count("max_output_tokens", 1..=u32::MAX)?,
        min_tokens: 0,
        ignore_eos: false,
        stop: Vec::new(),
        stop_tokens: Vec::new(),
        sampling,
    })
}

/// `tool_choice` by a word, a function's name, or a mode with some of the tools.
fn read_named(choice: &Fields<'_>) -> Result<ToolChoice, ApiError> {
    Ok(match choice.text("type")? {
        Some("function") => ToolChoice::Named(choice.text("name")?.unwrap_or_default().to_owned()),
        Some("allowed_tools") => match choice.text("mode")? {
            Some("none") => ToolChoice::None,
            Some("required") => ToolChoice::Required,
            Some(_) | None => ToolChoice::Auto,
        },
        // A tool that is hosted elsewhere cannot be called here.
        Some(_) | None => ToolChoice::Auto,
    })
}

/// `text.format`.
fn read_format(fields: &Fields<'_>) -> Result<Format, ApiError> {
    let Some(text) = fields.get("text") else {
        return Ok(Format::Text);
    };
    let text = Fields::at(text, "text")?;
    let Some(format) = text.get("format") else {
        return Ok(Format::Text);
    };
    let format = Fields::at(format, "text.format")?;
    match format.text("type")? {
        Some("text") | None => Ok(Format::Text),
        Some("json_object") => Ok(Format::JsonObject),
        Some("json_schema") => read_schema(&format),
        Some(other) => {
            let other: String = other.chars().take(40).collect();
            let message = format!(
                "text.format.type must be text, json_object or json_schema, found {other:?}"
            );
            Err(ApiError::param("text.format.type", message))
        }
    }
}

/// No effort is no thinking; otherwise the model's template decides.
fn read_thinking(fields: &Fields<'_>) -> Result<Option<bool>, ApiError> {
    let Some(reasoning) = fields.get("reasoning") else {
        return Ok(None);
    };
    let effort = Fields::at(reasoning, "reasoning")?.text("effort")?;
    Ok(effort.filter(|effort| *effort == "none").map(|_| false))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tools_of_a_namespace_are_called_by_their_bare_names_and_say_where_they_are_from() {
        let function = json!({"type": "function", "name": "run", "parameters": {}});
        let body = json!({"tools": [
            function,
            {"type": "namespace", "name": "ns", "tools": [function,
                {"type": "function", "name": "spawn"}]},
            {"type": "web_search"},
        ]});
        let (tools, names) = read_tools(&Fields::root(&body).unwrap()).unwrap();
        let shown: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!(shown, ["run", "ns__run", "spawn"]);
        assert_eq!(names.bare("spawn"), ("spawn", Some("ns")));
        assert_eq!(names.bare("ns__run"), ("run", Some("ns")));
        assert_eq!(names.bare("run"), ("run", None));
        assert_eq!(names.shown("run", Some("ns")), "ns__run");
    }
}
