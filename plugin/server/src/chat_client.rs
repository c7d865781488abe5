//! `rootstock chat`: a conversation in the terminal, and after each answer what of its prompt was
//! cached, where, and why not more.
//!
//! Text goes to the output as it comes, what is said about it to the other stream, so that the
//! conversation alone can be piped on. The loop knows no terminal: lines come in, bytes go out.

use std::io::{self, BufRead, Write};

use clap::Args;
use serde_json::{Value, json};

use crate::remote::{Address, Remote, RemoteError};

const HELP: &str = "/new begins again    /pin 5m keeps this conversation    /release lets it go
/why tells of the last prompt in full    /system TEXT sets the system prompt    /quit ends";

/// Flags of `chat`.
#[derive(Clone, Debug, Args)]
pub struct ChatFlags {
    /// Which server, and who asks.
    #[command(flatten)]
    pub address: Address,
    /// Name of the model; every name is served by the one that is loaded
    #[arg(long, default_value = "default")]
    pub model: String,
    /// System prompt
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Name of the session, under which it can be pinned and is shown [default: a new one]
    #[arg(long, value_name = "NAME")]
    pub session: Option<String>,
    /// Tokens of an answer, at most
    #[arg(long, default_value_t = 1024, value_name = "TOKENS")]
    pub max_tokens: u32,
    /// 0 always takes the most likely token
    #[arg(long, default_value_t = 0.7, value_name = "TEMPERATURE")]
    pub temperature: f64,
    /// Say this, print the answer, and end
    #[arg(long, value_name = "TEXT")]
    pub once: Option<String>,
}

/// Why a conversation ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The server.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The terminal.
    #[error("the terminal cannot be read or written: {0}")]
    Terminal(#[from] io::Error),
}

/// A conversation with a server.
#[derive(Debug)]
struct Chat {
    remote: Remote,
    flags: ChatFlags,
    session: String,
    messages: Vec<Value>,
    /// What was found about the last prompt.
    report: Value,
}

/// What came of an answer.
#[derive(Debug, Default)]
struct Told {
    text: String,
    usage: Value,
    nvext: Value,
}

/// Talks until the lines end.
///
/// # Errors
/// The terminal, or with `--once` the server.
pub async fn run(
    flags: ChatFlags,
    lines: &mut impl BufRead,
    out: &mut impl Write,
    notes: &mut impl Write,
) -> Result<(), ChatError> {
    let remote = Remote::new(&flags.address)?;
    let named = flags.session.clone();
    let session = named.unwrap_or_else(|| format!("chat-{:x}", crate::clock::unix_millis()));
    let once = flags.once.clone();
    let mut chat = Chat {
        remote,
        flags,
        session,
        messages: Vec::new(),
        report: Value::Null,
    };
    chat.begin();
    if let Some(text) = once {
        return chat.turn(&text, out, notes).await;
    }
    writeln!(notes, "{} as {}; /help", chat.remote.name(), chat.session)?;
    let mut line = String::new();
    loop {
        write!(notes, "> ")?;
        notes.flush()?;
        line.clear();
        if lines.read_line(&mut line)? == 0 {
            writeln!(notes)?;
            return Ok(());
        }
        let text = line.trim();
        if text == "/quit" {
            return Ok(());
        }
        let done = match text.strip_prefix('/') {
            _ if text.is_empty() => Ok(()),
            Some(command) => chat.command(command, notes).await,
            None => chat.turn(text, out, notes).await,
        };
        match done {
            Ok(()) => {}
            // The conversation is still there: the next line may do better.
            Err(ChatError::Remote(error)) => writeln!(notes, "{error}")?,
            Err(error) => return Err(error),
        }
    }
}

impl Chat {
    fn begin(&mut self) {
        self.report = Value::Null;
        let system = self.flags.system.iter();
        self.messages = system
            .map(|text| json!({"role": "system", "content": text}))
            .collect();
    }

    /// Says something and shows the answer as it comes. What failed is not part of the
    /// conversation.
    async fn turn(
        &mut self,
        text: &str,
        out: &mut impl Write,
        notes: &mut impl Write,
    ) -> Result<(), ChatError> {
        self.messages.push(json!({"role": "user", "content": text}));
        let body = json!({
            "model": self.flags.model, "messages": self.messages, "stream": true,
            "stream_options": {"include_usage": true},
            "max_tokens": self.flags.max_tokens, "temperature": self.flags.temperature,
            "nvext": {"agent_hints": {"program_id": self.session},
                "extra_fields": ["timing", "cache_report"]},
        });
        let mut told = Told::default();
        let take = |event: &Value| told.take(event, out);
        let streamed = self.remote.stream("/v1/chat/completions", &body, take);
        if let Err(error) = streamed.await {
            self.messages.pop();
            return Err(error.into());
        }
        writeln!(out)?;
        self.messages
            .push(json!({"role": "assistant", "content": told.text}));
        writeln!(notes, "  {}", told.summary())?;
        self.report = told.nvext;
        Ok(())
    }

    async fn command(&mut self, command: &str, notes: &mut impl Write) -> Result<(), ChatError> {
        let (name, rest) = command.split_once(' ').unwrap_or((command, ""));
        match name {
            "new" => {
                self.begin();
                writeln!(notes, "  a new conversation")?;
            }
            "system" => {
                self.flags.system = Some(rest.trim().to_owned()).filter(|text| !text.is_empty());
                self.begin();
                writeln!(notes, "  a new conversation with this system prompt")?;
            }
            "pin" => {
                let ttl = Some(rest.trim()).filter(|ttl| !ttl.is_empty());
                let payload = json!({"program": self.session, "ttl": ttl.unwrap_or("5m")});
                self.act("kv.pin", payload, notes).await?;
            }
            "release" => {
                let payload = json!({"program": self.session});
                self.act("kv.release", payload, notes).await?;
            }
            "why" => match self.report.is_null() {
                true => writeln!(notes, "  nothing was said yet")?,
                false => writeln!(notes, "{:#}", self.report)?,
            },
            _ => writeln!(notes, "{HELP}")?,
        }
        Ok(())
    }

    async fn act(
        &self,
        verb: &str,
        payload: Value,
        notes: &mut impl Write,
    ) -> Result<(), ChatError> {
        let action = json!({"action_id": "1", "action_type": verb, "action_version": "1.0",
            "payload": payload});
        let envelope = json!({"protocol_version": "0.1", "message_id": "chat",
            "actions": [action]});
        let answer = self.remote.post("/v1/kv/actions", &envelope).await?;
        let outcome = &answer["outcomes"][0];
        let status = outcome["status"].as_str().unwrap_or("no outcome");
        write!(notes, "  {status}")?;
        if let Some(pages) = outcome["pages"].as_u64().filter(|pages| *pages > 0) {
            write!(notes, ", {pages} pages")?;
        }
        if let Some(reason) = outcome["reason"].as_str() {
            write!(notes, ": {reason}")?;
        }
        writeln!(notes)?;
        Ok(())
    }
}

impl Told {
    fn take(&mut self, event: &Value, out: &mut impl Write) -> io::Result<()> {
        let delta = &event["choices"][0]["delta"];
        if let Some(text) = delta["content"].as_str() {
            self.text += text;
            out.write_all(text.as_bytes())?;
            out.flush()?;
        }
        if event["usage"].is_object() {
            self.usage = event["usage"].clone();
        }
        if event["nvext"]["cache_report"].is_object() {
            self.nvext = event["nvext"].clone();
        }
        Ok(())
    }

    /// One line: what was cached, where, and how fast the answer came.
    fn summary(&self) -> String {
        let (usage, report) = (&self.usage, &self.nvext["cache_report"]);
        let prompt = usage["prompt_tokens"].as_u64().unwrap_or_default();
        let tiers = ["device", "host", "storage"]
            .into_iter()
            .filter_map(|tier| {
                let tokens = report[format!("{tier}_tokens")].as_u64()?;
                (tokens > 0).then(|| format!("{tokens} on {tier}"))
            });
        let tiers: Vec<String> = tiers.collect();
        let found = match tiers.is_empty() {
            true => "nothing".to_owned(),
            false => tiers.join(", "),
        };
        let mut line = format!("{prompt} tokens of prompt, cached: {found}");
        if let Some(why) = report["miss"]["text"].as_str() {
            line += &format!(" ({why})");
        }
        let timing = &self.nvext["timing"];
        if let Some(ttft_ms) = timing["ttft_ms"].as_f64() {
            line += &format!("; first token after {ttft_ms:.0} ms");
        }
        let tokens = usage["completion_tokens"].as_u64().unwrap_or_default();
        line + &format!("; {tokens} tokens said")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_tiers_cause_and_times_and_says_when_nothing_was_found() {
        let told = |report: Value| Told {
            text: String::new(),
            usage: json!({"prompt_tokens": 430, "completion_tokens": 9}),
            nvext: json!({"cache_report": report, "timing": {"ttft_ms": 35.4}}),
        };
        let found = told(
            json!({"device_tokens": 400, "host_tokens": 16, "storage_tokens": 0,
            "computed_tokens": 14, "miss": {"text": "new from token 416 on"}}),
        );
        assert_eq!(
            found.summary(),
            "430 tokens of prompt, cached: 400 on device, 16 on host (new from token 416 on); \
             first token after 35 ms; 9 tokens said"
        );
        let nothing = told(json!({})).summary();
        assert!(nothing.contains("cached: nothing;"), "{nothing}");
    }
}
