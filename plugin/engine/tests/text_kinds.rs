//! Kinds without any hint: which bytes of a rendered conversation are system prompt, tools,
//! history, tool output and thinking, in four families of chat templates written here after those
//! that models come with. The truth is laid down piece by piece beside the template; nowhere may
//! the spans differ from it for as long as a page of 16 tokens.

#[path = "text_support/tiny.rs"]
mod tiny;

use rootstock_engine::gguf::Gguf;
use rootstock_engine::template::{ChatTemplate, Part, RenderArgs};
use serde_json::{Value, json};
use tiny::{file, tokenizer};

const PAGE_TOKENS: usize = 16;
const CONVERSATIONS: u32 = 16;

/// `ChatML` as the Qwen models frame it: tools in the system message, results in user turns.
const QWEN: &str = "{%- if tools %}{{- '<|im_start|>system\n' }}\
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}\
    {%- else %}{{- 'You are a helpful assistant.' }}{%- endif %}\
    {{- '\n\n# Tools\n\nCall functions within XML tags:\n<tools>' }}\
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}\
    {{- '\n</tools><|im_end|>\n' }}\
    {%- elif messages[0].role == 'system' %}\
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}\
    {%- for message in messages %}\
    {%- if message.role == 'tool' %}\
    {{- '<|im_start|>user\n<tool_response>\n' + message.content }}\
    {{- '\n</tool_response><|im_end|>\n' }}\
    {%- elif message.role != 'system' %}\
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}\
    {%- endif %}{%- endfor %}{{- '<|im_start|>assistant\n' }}";

/// Llama 3: headers, and the tools before the first question.
const LLAMA: &str = "{{- '<|begin_of_text|>' }}\
    {%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}\
    {%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}\
    {{- '<|start_header_id|>system<|end_header_id|>\n\nKnowledge ends 2023.\n\n' }}\
    {{- system + '<|eot_id|>' }}\
    {%- for message in messages %}\
    {%- if message.role == 'tool' %}\
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}\
    {%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}\
    {%- if loop.first and tools %}{{- 'Functions:\n\n' }}\
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}{%- endif %}\
    {{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}\
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}";

/// Mistral: brackets, the system prompt in the first question, nothing that heads an answer.
const MISTRAL: &str = "{%- if messages[0].role == 'system' %}\
    {%- set system = messages[0].content + '\n\n' %}{%- set messages = messages[1:] %}\
    {%- else %}{%- set system = '' %}{%- endif %}{{- '<s>' }}\
    {%- if tools %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}\
    {%- for message in messages %}\
    {%- if message.role == 'user' %}{{- '[INST] ' }}\
    {%- if loop.first %}{{- system }}{%- endif %}{{- message.content + '[/INST]' }}\
    {%- elif message.role == 'tool' %}\
    {{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}\
    {%- else %}{{- ' ' + message.content + '</s>' }}{%- endif %}{%- endfor %}";

/// `ChatML` with thoughts, which are shown only after the last question.
const THINKING: &str = "{%- set ns = namespace(last=0) %}\
    {%- for message in messages %}{%- if message.role == 'user' %}\
    {%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}\
    {%- for message in messages %}\
    {%- if message.role == 'tool' %}\
    {{- '<|im_start|>user\n<tool_response>\n' + message.content }}\
    {{- '\n</tool_response><|im_end|>\n' }}\
    {%- else %}{{- '<|im_start|>' + message.role + '\n' }}\
    {%- if message.reasoning_content and loop.index0 > ns.last %}\
    {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}\
    {{- message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}\
    {{- '<|im_start|>assistant\n' }}";

/// A stream of numbers that is the same everywhere.
struct Dice(u32);

impl Dice {
    fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 16) % end
    }

    /// Words among which are those that templates use themselves.
    fn text(&mut self, words_max: u32) -> String {
        const WORDS: [&str; 12] = [
            "user",
            "assistant",
            "the",
            "system",
            "ok",
            "tree",
            "tools",
            "page",
            "INST",
            "think",
            "{\"a\": 1}",
            "42.",
        ];
        let count = 1 + self.below(words_max);
        let words = (0..count).map(|_| {
            let word = self.below(12) as usize;
            WORDS.get(word).copied().unwrap_or_default()
        });
        words.collect::<Vec<_>>().join(" ")
    }
}

/// A conversation of up to six turns, some with tools; it ends with a question or a result. So
/// many in four have a system prompt.
fn conversation(dice: &mut Dice, system_in: u32) -> (Value, Option<Value>) {
    let mut messages = Vec::new();
    if dice.below(4) < system_in {
        messages.push(json!({"role": "system", "content": dice.text(200)}));
    }
    let has_tools = dice.below(2) == 0;
    for _ in 0..=dice.below(5) {
        messages.push(json!({"role": "user", "content": dice.text(60)}));
        if has_tools {
            for _ in 0..dice.below(3) {
                messages.push(json!({
                    "role": "assistant", "content": dice.text(20),
                    "reasoning_content": dice.text(90),
                }));
                messages.push(json!({"role": "tool", "content": dice.text(150)}));
            }
        }
        messages.push(json!({
            "role": "assistant", "content": dice.text(80), "reasoning_content": dice.text(90),
        }));
    }
    messages.push(json!({"role": "user", "content": dice.text(60)}));
    if has_tools && dice.below(2) == 0 {
        messages.push(json!({
            "role": "assistant", "content": dice.text(9), "reasoning_content": dice.text(90),
        }));
        messages.push(json!({"role": "tool", "content": dice.text(150)}));
    }
    let tool = |name: &str| {
        json!({"type": "function", "function": {"name": name, "description": "Looks it up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}})
    };
    let tools = has_tools.then(|| json!([tool("search"), tool("read_page")]));
    (Value::Array(messages), tools)
}

/// The text as it should be, and what each of its bytes is.
#[derive(Default)]
struct Truth {
    text: String,
    parts: Vec<Part>,
}

impl Truth {
    fn add(&mut self, part: Part, text: &str) {
        self.text.push_str(text);
        self.parts.resize(self.text.len(), part);
    }

    /// What stands between two texts, as the template wrote it.
    fn copy(&mut self, part: Part, from: &str, to: &str) {
        let rest = from.get(self.text.len()..).unwrap_or_default();
        let end = rest.find(to).expect("the text that follows");
        self.add(part, rest.get(..end).unwrap_or_default());
    }
}

type Lay = fn(&mut Truth, &[Value], bool, &str);

fn field<'a>(message: &'a Value, name: &str) -> &'a str {
    message
        .get(name)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

fn part_of(role: &str) -> Part {
    match role {
        "system" => Part::System,
        "user" => Part::User,
        "tool" => Part::Tool,
        _ => Part::Assistant,
    }
}

fn tool_turn(truth: &mut Truth, content: &str) {
    truth.add(Part::Tool, "<|im_start|>user\n<tool_response>\n");
    truth.add(Part::Tool, content);
    truth.add(Part::Tool, "\n</tool_response><|im_end|>\n");
}

fn lay_qwen(truth: &mut Truth, messages: &[Value], has_tools: bool, rendered: &str) {
    let system = messages
        .first()
        .filter(|first| field(first, "role") == "system");
    if has_tools || system.is_some() {
        truth.add(Part::System, "<|im_start|>system\n");
        let default = "You are a helpful assistant.";
        truth.add(
            Part::System,
            system.map_or(default, |first| field(first, "content")),
        );
        if has_tools {
            let head = "\n\n# Tools\n\nCall functions within XML tags:\n<tools>\n";
            // Without a system message it is all the template's own.
            let part = system.map_or(Part::System, |_| Part::Tools);
            truth.add(part, head);
            truth.copy(Part::Tools, rendered, "\n</tools><|im_end|>");
            truth.add(Part::Tools, "\n</tools>");
        }
        truth.add(Part::System, "<|im_end|>\n");
    }
    for message in messages.iter().skip(usize::from(system.is_some())) {
        let (role, content) = (field(message, "role"), field(message, "content"));
        if role == "tool" {
            tool_turn(truth, content);
        } else {
            truth.add(
                part_of(role),
                &format!("<|im_start|>{role}\n{content}<|im_end|>\n"),
            );
        }
    }
    truth.add(Part::Generation, "<|im_start|>assistant\n");
}

fn lay_llama(truth: &mut Truth, messages: &[Value], has_tools: bool, rendered: &str) {
    let system = messages
        .first()
        .filter(|first| field(first, "role") == "system");
    truth.add(
        Part::System,
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n",
    );
    truth.add(Part::System, "Knowledge ends 2023.\n\n");
    truth.add(
        Part::System,
        system.map_or("", |first| field(first, "content")),
    );
    truth.add(Part::System, "<|eot_id|>");
    let rest = messages.iter().skip(usize::from(system.is_some()));
    for (at, message) in rest.enumerate() {
        let (role, content) = (field(message, "role"), field(message, "content"));
        let part = part_of(role);
        let shown = if role == "tool" { "ipython" } else { role };
        truth.add(
            part,
            &format!("<|start_header_id|>{shown}<|end_header_id|>\n\n"),
        );
        if at == 0 && has_tools {
            truth.add(part, "Functions:\n\n");
            truth.copy(Part::Tools, rendered, &format!("{content}<|eot_id|>"));
        }
        truth.add(part, &format!("{content}<|eot_id|>"));
    }
    truth.add(
        Part::Generation,
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    );
}

fn lay_mistral(truth: &mut Truth, messages: &[Value], has_tools: bool, rendered: &str) {
    let system = messages
        .first()
        .filter(|first| field(first, "role") == "system");
    truth.add(Part::System, "<s>");
    if has_tools {
        truth.add(Part::Tools, "[AVAILABLE_TOOLS] ");
        truth.copy(Part::Tools, rendered, "[/AVAILABLE_TOOLS]");
        truth.add(Part::Tools, "[/AVAILABLE_TOOLS]");
    }
    let rest = messages.iter().skip(usize::from(system.is_some()));
    for (at, message) in rest.enumerate() {
        let (role, content) = (field(message, "role"), field(message, "content"));
        match role {
            "user" => {
                truth.add(Part::User, "[INST] ");
                if let Some(system) = system.filter(|_| at == 0) {
                    truth.add(Part::System, field(system, "content"));
                    truth.add(Part::System, "\n\n");
                }
                truth.add(Part::User, &format!("{content}[/INST]"));
            }
            "tool" => truth.add(
                Part::Tool,
                &format!("[TOOL_RESULTS] {content}[/TOOL_RESULTS]"),
            ),
            _ => truth.add(Part::Assistant, &format!(" {content}</s>")),
        }
    }
}

fn lay_thinking(truth: &mut Truth, messages: &[Value], _: bool, _: &str) {
    let last = messages
        .iter()
        .rposition(|message| field(message, "role") == "user");
    for (at, message) in messages.iter().enumerate() {
        let (role, content) = (field(message, "role"), field(message, "content"));
        let part = part_of(role);
        if role == "tool" {
            tool_turn(truth, content);
            continue;
        }
        truth.add(part, &format!("<|im_start|>{role}\n"));
        let thoughts = field(message, "reasoning_content");
        if !thoughts.is_empty() && Some(at) > last {
            truth.add(
                Part::Thinking,
                &format!("<think>\n{thoughts}\n</think>\n\n"),
            );
        }
        truth.add(part, &format!("{content}<|im_end|>\n"));
    }
    truth.add(Part::Generation, "<|im_start|>assistant\n");
}

/// Texts that are one token in their family.
const CONTROL: [&str; 14] = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "</s>",
    "<think>",
    "</think>",
];

/// At most as many tokens as a tokenizer makes of a text: control tokens, runs of up to four
/// letters, and all else one by one.
fn tokens(text: &str) -> usize {
    let text = CONTROL
        .iter()
        .fold(text.to_owned(), |text, one| text.replace(one, "+"));
    let (mut count, mut run) = (0, 0);
    for letter in text.chars() {
        run = if letter.is_alphanumeric() { run + 1 } else { 0 };
        count += usize::from(run % 4 <= 1 && letter != ' ');
    }
    count
}

/// Questions and answers are both history.
fn same(one: Part, other: Part) -> bool {
    let kind = |part| {
        if part == Part::Assistant {
            Part::User
        } else {
            part
        }
    };
    kind(one) == kind(other)
}

/// The longest stretch in which spans and truth differ, in tokens.
fn worst(truth: &Truth, parts: &[Part]) -> (usize, String) {
    let (mut worst, mut stretch) = ((0, String::new()), String::new());
    let end = std::iter::once((truth.text.len(), ' '));
    for (at, letter) in truth.text.char_indices().chain(end) {
        assert!(letter.is_ascii(), "a byte a letter");
        let differs = truth.parts.get(at).is_some_and(|&should| {
            let is = parts.get(at);
            is.is_none_or(|&is| !same(is, should))
        });
        if differs {
            stretch.push(letter);
            continue;
        }
        let stretch = std::mem::take(&mut stretch);
        if tokens(&stretch) > worst.0 {
            worst = (tokens(&stretch), stretch);
        }
    }
    worst
}

fn check(family: &str, source: &str, lay: Lay, system_in: u32) -> usize {
    let writer = file("smollm").text("tokenizer.chat_template", source);
    let tokenizer = tokenizer(&writer);
    let model = Gguf::from_bytes(writer.to_bytes()).expect("the writer writes good files");
    let template = ChatTemplate::from_gguf(&model, &tokenizer).expect("the template compiles");
    let mut dice = Dice(11);
    let mut thoughts = 0;
    for number in 0..CONVERSATIONS {
        let (messages, tools) = conversation(&mut dice, system_in);
        let rendered = template
            .render(&RenderArgs {
                messages: &messages,
                tools: tools.as_ref(),
                add_generation_prompt: true,
                extra: None,
                unix_s: 0,
            })
            .expect("a text");
        let mut truth = Truth::default();
        let all = messages.as_array().map(Vec::as_slice).unwrap_or_default();
        lay(&mut truth, all, tools.is_some(), &rendered.text);
        assert_eq!(rendered.text, truth.text, "{family} {number}");
        let parts = rendered.spans.iter();
        let parts: Vec<Part> = parts
            .flat_map(|span| span.bytes.clone().map(|_| span.part))
            .collect();
        let (tokens, text) = worst(&truth, &parts);
        assert!(
            tokens < PAGE_TOKENS,
            "{family} {number}: {tokens} tokens: {text:?}"
        );
        thoughts += usize::from(truth.parts.contains(&Part::Thinking));
    }
    thoughts
}

#[test]
fn spans_are_within_a_page_of_the_truth_in_chatml_with_tools() {
    check("qwen", QWEN, lay_qwen, 3);
}

#[test]
fn spans_are_within_a_page_of_the_truth_in_llama_3() {
    // The vocabulary of the test does not close turns as this family does, so that what the
    // template says by itself cannot be told from the first question.
    check("llama", LLAMA, lay_llama, 4);
}

#[test]
fn spans_are_within_a_page_of_the_truth_in_mistral() {
    check("mistral", MISTRAL, lay_mistral, 3);
}

#[test]
fn spans_are_within_a_page_of_the_truth_where_a_template_shows_thoughts() {
    let with_thoughts = check("thinking", THINKING, lay_thinking, 3);
    assert!(with_thoughts > 3, "{with_thoughts} conversations show some");
}
