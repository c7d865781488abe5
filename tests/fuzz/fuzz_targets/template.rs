//! Chat templates of any text over conversations of any text: an error or a rendering, in bounded
//! time and memory, whose spans cover it without gaps or overlaps.
//!
//! `cargo +nightly fuzz run template -- -max_total_time=60`, in `tests/`.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use rootstock_engine::template::{ChatTemplate, RenderArgs};
use serde_json::json;

#[derive(Arbitrary, Debug)]
struct Input {
    /// Pieces of a template, each a text or one of the words below.
    pieces: Vec<(u8, String)>,
    /// Role, content, and whether the content is a list of parts.
    messages: Vec<(u8, String, bool)>,
    generate: bool,
}

const WORDS: [&str; 16] = [
    "{% for message in messages %}",
    "{% endfor %}",
    "{{ message.role }}",
    "{{ message.content }}",
    "{{ message['content'] | trim }}",
    "{% if loop.first %}",
    "{% elif message.role == 'system' %}",
    "{% else %}",
    "{% endif %}",
    "{% set ns = namespace(a=0) %}",
    "{{ tools | tojson }}",
    "{% if add_generation_prompt %}",
    "{{ raise_exception('no') }}",
    "{% generation %}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(messages) }}",
    "{{ (messages * 9) | length }}",
];
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

fuzz_target!(|input: Input| {
    let mut source = String::new();
    for (word, text) in input.pieces.iter().take(40) {
        source.push_str(WORDS.get(usize::from(*word)).unwrap_or(&text.as_str()));
    }
    let Ok(template) = ChatTemplate::new(&source) else {
        return;
    };
    let messages: Vec<_> = input
        .messages
        .iter()
        .take(8)
        .map(|(role, content, parts)| {
            let role = ROLES[usize::from(*role) % ROLES.len()];
            if *parts {
                json!({"role": role, "content": [{"type": "text", "text": content}]})
            } else {
                json!({"role": role, "content": content})
            }
        })
        .collect();
    let rendered = template.render(&RenderArgs {
        messages: &messages.into(),
        tools: None,
        add_generation_prompt: input.generate,
        extra: None,
        unix_s: 1_800_000_000,
    });
    if let Ok(rendered) = rendered {
        let mut end = 0;
        for span in &rendered.spans {
            assert_eq!(span.bytes.start, end, "no gap, no overlap");
            end = span.bytes.end;
        }
        assert_eq!(end, rendered.text.len(), "the whole text is covered");
    }
});
