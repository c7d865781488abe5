//! How a model writes tool calls and thoughts. A model file does not say it; the words of its chat
//! template do, because the template has to write earlier calls in the same form.

use rootstock::radix::Token;

/// The text form of a tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallForm {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen, and models whose
    /// template knows no tools, which are told to write this form.
    Tags,
    /// `[TOOL_CALLS][{"name": .., "arguments": {..}}]`, or `[TOOL_CALLS]name[ARGS]{..}`.
    Mistral,
    /// `{"name": .., "parameters": {..}}` as the whole answer, perhaps behind `<|python_tag|>`.
    Llama,
}

/// Texts around calls and thoughts; as tokens they are often control tokens, which answers
/// otherwise do not show.
pub const MARKERS: [&str; 8] = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|python_tag|>",
];

/// What a model's template tells about its answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Style {
    /// How calls are written.
    pub form: CallForm,
    /// Whether the template has a place for tools; if not, we write them into the system message.
    pub takes_tools: bool,
    /// Whether answers may begin with `<think>`.
    pub thinks: bool,
    /// Control tokens among [`MARKERS`], ascending.
    pub shown: Vec<Token>,
}

impl Style {
    /// Reads a template's source; an empty one is that of a model without template.
    pub fn of(template: &str) -> Style {
        let has = |word: &str| template.contains(word);
        let form = if has("[TOOL_CALLS]") {
            CallForm::Mistral
        } else if has("<tool_call>") {
            CallForm::Tags
        } else if has("<|python_tag|>") || has("ipython") && has("\"parameters\": ") {
            CallForm::Llama
        } else {
            CallForm::Tags
        };
        Style {
            form,
            takes_tools: has("tools") && (has("tool_calls") || has("ipython")),
            thinks: has("<think>"),
            shown: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_a_template_tell_the_form_of_calls() {
        let qwen = "{% if tools %}..{% for tool_call in message.tool_calls %}<tool_call>";
        let mistral = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}{% if m.tool_calls %}[TOOL_CALLS]";
        let llama = "{% if tools %}'ipython' '\"parameters\": ' <|python_tag|>";
        let plain = "{% for m in messages %}{{ m.content }}{% endfor %}";
        let found = |source| {
            let style = Style::of(source);
            (style.form, style.takes_tools)
        };
        assert_eq!(found(qwen), (CallForm::Tags, true));
        assert_eq!(found(mistral), (CallForm::Mistral, true));
        assert_eq!(found(llama), (CallForm::Llama, true));
        assert_eq!(found(plain), (CallForm::Tags, false));
    }
}
