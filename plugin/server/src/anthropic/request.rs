//! The body of `/v1/messages` and `/v1/messages/count_tokens`.
//!
//! Fields, block types, tool types and betas that are not known are left out: the programs that
//! speak this API send new ones with every release.

use rootstock::scheduler::SamplingParams;
use serde_json::Value;

use crate::anthropic::cache;
use crate::anthropic::content::Talk;
use crate::chat::conversation::{Conversation, Format, Mark, Place, Tool, ToolChoice};
use crate::chat::tools::{check_choice, read_function, read_schema};
use crate::http::api_error::ApiError;
use crate::openai::ask::{Ask, STOP_BYTES_MAX, STOPS_MAX, random_seed};
use crate::openai::fields::{Fields, wrong_type};

/// Reads the conversation, with its breakpoints.
///
/// # Errors
/// The first field that is wrong.
pub fn read_talk(fields: &Fields<'_>, strip_preamble: bool) -> Result<Conversation, ApiError> {
    let (tools, mut marks) = read_tools(fields)?;
    let mut talk = Talk::default();
    talk.read_system(fields, strip_preamble)?;
    let list = fields.list("messages")?.unwrap_or_default();
    if list.is_empty() {
        let message = "messages must have at least 1 entry, found none";
        return Err(ApiError::param("messages", message));
    }
    for (index, message) in list.iter().enumerate() {
        talk.read_message(message, &format!("messages[{index}]"))?;
    }
    marks.append(&mut talk.marks);
    marks.extend(cache::read_root(fields)?);
    cache::check(&marks)?;
    let (choice, single_call) = read_choice(fields)?;
    check_choice(&tools, &choice)?;
    let mut talk = Conversation {
        prefill: take_prefill(&mut talk.messages),
        messages: talk.messages,
        tools,
        choice,
        single_call,
        format: read_format(fields)?,
        thinking: read_thinking(fields)?,
        marks,
        ..Conversation::default()
    };
    talk.canonical_ids();
    Ok(talk)
}

/// Reads how to generate.
///
/// # Errors
/// The first field that is wrong; `max_tokens` has to be there.
pub fn read_ask(fields: &Fields<'_>) -> Result<Ask, ApiError> {
    let max_tokens = fields.count("max_tokens", 1..=u32::MAX)?.ok_or_else(|| {
        ApiError::param(
            "max_tokens",
            "max_tokens is missing; this API needs it, at least 1",
        )
    })?;
    let off = SamplingParams::default();
    let sampling = SamplingParams {
        temperature: fields
            .number("temperature", 0.0..=2.0)?
            .unwrap_or(off.temperature),
        top_k: fields.count("top_k", 0..=u32::MAX)?.unwrap_or(off.top_k),
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
        max_tokens: Some(max_tokens),
        min_tokens: 0,
        ignore_eos: false,
        stop: read_stop(fields)?,
        stop_tokens: Vec::new(),
        sampling,
    })
}

fn read_stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let list = fields.list("stop_sequences")?.unwrap_or_default();
    if list.len() > STOPS_MAX {
        let found = list.len();
        let message =
            format!("stop_sequences must have at most {STOPS_MAX} entries, found {found}");
        return Err(ApiError::param("stop_sequences", message));
    }
    let read = |(index, value): (usize, &Value)| {
        let name = format!("stop_sequences[{index}]");
        match value.as_str() {
            Some(text) if (1..=STOP_BYTES_MAX).contains(&text.len()) => Ok(text.to_owned()),
            Some(text) => {
                let bytes = text.len();
                let message =
                    format!("{name} must have 1 to {STOP_BYTES_MAX} bytes, found {bytes}");
                Err(ApiError::param(name, message))
            }
            None => Err(wrong_type(&name, "a string", value)),
        }
    };
    list.iter().enumerate().map(read).collect()
}

/// Client tools. What has no schema is hosted by somebody else and left out.
fn read_tools(fields: &Fields<'_>) -> Result<(Vec<Tool>, Vec<Mark>), ApiError> {
    let (mut tools, mut marks) = (Vec::new(), Vec::new());
    for (index, tool) in fields.list("tools")?.unwrap_or_default().iter().enumerate() {
        let tool = Fields::at(tool, &format!("tools[{index}]"))?;
        let place = Place::Tools;
        marks.extend(cache::read_ttl(&tool)?.map(|ttl| Mark { place, ttl }));
        let hosted = tool.text("type")?.is_some_and(|kind| kind != "custom");
        if hosted && tool.get("input_schema").is_none() {
            continue;
        }
        tools.push(read_function(&tool, "input_schema")?);
    }
    Ok((tools, marks))
}

fn read_choice(fields: &Fields<'_>) -> Result<(ToolChoice, bool), ApiError> {
    let Some(choice) = fields.get("tool_choice") else {
        return Ok((ToolChoice::Auto, false));
    };
    let choice = Fields::at(choice, "tool_choice")?;
    let single = choice.flag("disable_parallel_tool_use")?.unwrap_or(false);
    let kind = match choice.text("type")? {
        Some("auto") | None => ToolChoice::Auto,
        Some("any") => ToolChoice::Required,
        Some("none") => ToolChoice::None,
        Some("tool") => ToolChoice::Named(choice.text("name")?.unwrap_or_default().to_owned()),
        Some(other) => {
            let other: String = other.chars().take(40).collect();
            let message =
                format!("tool_choice.type must be auto, any, tool or none, found {other:?}");
            return Err(ApiError::param("tool_choice.type", message));
        }
    };
    Ok((kind, single))
}

/// `output_config.format`, or its former place `output_format`.
fn read_format(fields: &Fields<'_>) -> Result<Format, ApiError> {
    let config = fields
        .get("output_config")
        .filter(|config| config.is_object());
    let format = config
        .and_then(|config| config.get("format"))
        .filter(|format| !format.is_null())
        .or_else(|| fields.get("output_format"));
    match format {
        Some(format) if format["type"] == "json_schema" => {
            read_schema(&Fields::at(format, "output_config.format")?)
        }
        Some(_) | None => Ok(Format::Text),
    }
}

fn read_thinking(fields: &Fields<'_>) -> Result<Option<bool>, ApiError> {
    let Some(thinking) = fields.get("thinking") else {
        return Ok(None);
    };
    let kind = Fields::at(thinking, "thinking")?.text("type")?;
    Ok(kind.map(|kind| kind != "disabled"))
}

/// A last message of the assistant is the beginning of the answer.
fn take_prefill(messages: &mut Vec<Value>) -> Option<String> {
    let last = messages.last()?;
    let is_text = last["role"] == "assistant" && last.get("tool_calls").is_none();
    if !is_text {
        return None;
    }
    let last = messages.pop()?;
    last["content"]
        .as_str()
        .map(str::to_owned)
        .filter(|text| !text.is_empty())
}
