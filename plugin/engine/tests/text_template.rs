//! Chat templates: the texts that Jinja2 gives, limits, refusals, and which bytes are whose.

#[path = "text_support/tiny.rs"]
mod tiny;

use rootstock_engine::gguf::Gguf;
use rootstock_engine::template::{ChatTemplate, Part, RenderArgs, TemplateError};
use serde_json::{Value, json};
use tiny::{file, tokenizer};

const CHATML: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != \
    'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + \
    message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if \
    add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn args(messages: &Value) -> RenderArgs<'_> {
    RenderArgs {
        messages,
        tools: None,
        add_generation_prompt: true,
        extra: None,
        unix_s: 0,
    }
}

/// A template as it comes in a model file, with the tiny vocabulary.
fn from_file(source: &str) -> Result<ChatTemplate, TemplateError> {
    let writer = file("smollm").text("tokenizer.chat_template", source);
    let tokenizer = tokenizer(&writer);
    let file = Gguf::from_bytes(writer.to_bytes()).expect("the writer writes good files");
    ChatTemplate::from_gguf(&file, &tokenizer)
}

fn render_error(source: &str, messages: &Value) -> TemplateError {
    let template = ChatTemplate::new(source).expect("the template compiles");
    template
        .render(&args(messages))
        .expect_err("the render must fail")
}

/// The spans as (part, message, text).
fn spans(source: &str, args: &RenderArgs<'_>) -> Vec<(Part, Option<usize>, String)> {
    let rendered = from_file(source)
        .expect("the template compiles")
        .render(args)
        .expect("a text");
    let mut at = 0;
    let spans = rendered.spans.iter().map(|span| {
        assert_eq!(span.bytes.start, at, "spans leave no gap");
        at = span.bytes.end;
        (
            span.part,
            span.message,
            rendered.text[span.bytes.clone()].to_owned(),
        )
    });
    let spans = spans.collect();
    assert_eq!(at, rendered.text.len(), "spans cover the text");
    spans
}

#[test]
fn texts_are_those_of_jinja2() {
    let cases: Value = serde_json::from_str(include_str!("data/text_templates.json")).unwrap();
    let cases = cases.as_array().unwrap();
    for case in cases {
        let template = ChatTemplate::new(case["template"].as_str().unwrap()).unwrap();
        let args = RenderArgs {
            messages: &case["messages"],
            tools: case.get("tools"),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            extra: case.get("extra").and_then(Value::as_object),
            unix_s: 0,
        };
        match (template.render(&args), case.get("text"), case.get("raised")) {
            (Ok(rendered), Some(text), None) => {
                assert_eq!(rendered.text, text.as_str().unwrap(), "{}", case["name"]);
            }
            (Err(TemplateError::Raised { message }), None, Some(raised)) => {
                assert_eq!(message, raised.as_str().unwrap(), "{}", case["name"]);
            }
            (other, ..) => panic!("{}: {other:?}", case["name"]),
        }
    }
    assert!(cases.len() >= 8);
}

#[test]
fn a_model_without_a_template_is_refused_with_the_alternative() {
    let writer = file("smollm");
    let gguf = Gguf::from_bytes(writer.to_bytes()).unwrap();
    let error = ChatTemplate::from_gguf(&gguf, &tokenizer(&writer)).unwrap_err();
    assert!(error.to_string().contains("raw completions"), "{error}");
    assert!(!error.is_callers());
}

#[test]
fn broken_templates_and_requests_say_where_and_whose_fault() {
    let error = ChatTemplate::new("line one\n{% for %}").unwrap_err();
    assert!(error.to_string().contains("line 2"), "{error}");
    let error = render_error("{{ raise_exception('no system role') }}", &json!([]));
    assert!(
        error.is_callers() && error.to_string().ends_with("no system role"),
        "{error}"
    );
    let error = render_error("a\nb{{ messages[0].x.y }}", &json!([{}]));
    assert!(
        !error.is_callers() && error.to_string().contains("line 2"),
        "{error}"
    );
    let error = render_error("", &json!({"role": "user"}));
    assert!(
        error.is_callers() && error.to_string().contains("array"),
        "{error}"
    );
    let error = ChatTemplate::new(&" ".repeat((1 << 20) + 1)).unwrap_err();
    assert!(error.to_string().contains("1048577 bytes"), "{error}");
}

#[test]
fn a_template_cannot_run_or_grow_without_end() {
    for source in [
        "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(100) %}\
         {% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ] {
        let error = render_error(source, &json!([]));
        let bounded = matches!(
            error,
            TemplateError::OutOfFuel | TemplateError::Render { .. }
        );
        assert!(bounded, "{source}: {error}");
    }
}

#[test]
fn extra_variables_reach_the_template_but_replace_nothing() {
    let template =
        ChatTemplate::new("{{ mode }}{{ messages | length }}{{ tools is none }}").unwrap();
    let extra = json!({"mode": "fast", "messages": "stolen", "tools": 3});
    let messages = json!([{"role": "user", "content": "x"}]);
    let args = RenderArgs {
        extra: extra.as_object(),
        ..args(&messages)
    };
    assert_eq!(template.render(&args).unwrap().text, "fast1True");
}

#[test]
fn special_texts_and_the_date_are_given_to_the_template() {
    let template =
        from_file("{{ bos_token }}|{{ eos_token }}|{{ strftime_now('%d %b %Y') }}").unwrap();
    let none = json!([]);
    let args = RenderArgs {
        unix_s: 1_769_817_600,
        ..args(&none)
    };
    assert_eq!(
        template.render(&args).unwrap().text,
        "<|im_start|>|<|im_end|>|31 Jan 2026"
    );
}

#[test]
fn each_message_owns_its_words_and_its_frame() {
    let messages = json!([
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "user"},
        {"role": "assistant", "content": "user"},
        {"role": "tool", "content": "<|im_start|>tool"},
        {"role": "user", "content": [{"type": "text", "text": "unused"}]},
    ]);
    let messages = json!(messages.as_array().unwrap()[..4]);
    let found = spans(CHATML, &args(&messages));
    let expected = [
        (
            Part::System,
            Some(0),
            "<|im_start|>system\nrules<|im_end|>\n",
        ),
        (Part::User, Some(1), "<|im_start|>user\nuser<|im_end|>\n"),
        (
            Part::Assistant,
            Some(2),
            "<|im_start|>assistant\nuser<|im_end|>\n",
        ),
        (
            Part::Tool,
            Some(3),
            "<|im_start|>tool\n<|im_start|>tool<|im_end|>\n",
        ),
        (Part::Generation, None, "<|im_start|>assistant\n"),
    ];
    let expected = expected.map(|(part, message, text)| (part, message, text.to_owned()));
    assert_eq!(found, expected);
}

#[test]
fn the_system_prompt_that_a_template_adds_is_system() {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let found = spans(CHATML, &args(&messages));
    assert_eq!(
        found[0],
        (
            Part::System,
            None,
            "<|im_start|>system\nBe kind<|im_end|>\n".to_owned()
        )
    );
    assert_eq!(
        found[1],
        (
            Part::User,
            Some(0),
            "<|im_start|>user\nhi<|im_end|>\n".to_owned()
        )
    );
    let found = spans("fixed text", &args(&json!([])));
    assert_eq!(found, [(Part::System, None, "fixed text".to_owned())]);
}

#[test]
fn trimmed_and_thinking_contents_are_found() {
    let cases: Value = serde_json::from_str(include_str!("data/text_templates.json")).unwrap();
    let case = &cases.as_array().unwrap()[2];
    let args = RenderArgs {
        tools: case.get("tools"),
        ..args(&case["messages"])
    };
    let found = spans(case["template"].as_str().unwrap(), &args);
    let of = |wanted: Part| {
        let texts = found.iter().filter(move |(part, ..)| *part == wanted);
        texts.map(|(.., text)| text.as_str())
    };
    let tools: Vec<_> = of(Part::Tools).collect();
    assert_eq!(tools.len(), 1);
    assert!(
        tools[0].trim_start().starts_with("# Tools") && tools[0].contains("\"n\": 1.5}}"),
        "{tools:?}"
    );
    assert!(of(Part::System).next().unwrap().contains("Be brief."));
    assert!(of(Part::Tool).any(|text| text.contains("Sunny")));
    assert!(of(Part::Assistant).any(|text| text.contains("Looking.")));
    let strict = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}";
    let messages = json!([{"role": "user", "content": " a \n"}, {"role": "user", "content": "a"}]);
    let found = spans(
        strict,
        &RenderArgs {
            add_generation_prompt: false,
            ..args
        },
    );
    assert_eq!(found.len(), 5, "{found:?}");
    let found = spans(
        strict,
        &RenderArgs {
            messages: &messages,
            tools: None,
            add_generation_prompt: false,
            ..args
        },
    );
    let expected = [
        (Part::User, Some(0), "[user]a".to_owned()),
        (Part::User, Some(1), "\n[user]a\n".to_owned()),
    ];
    assert_eq!(found, expected);
}

#[test]
fn contents_that_a_template_changes_are_searched_for() {
    // The marks do not contain "long", so the skeleton has other words than the text.
    let source = "{% for m in messages %}<{{ m.role }}>{% if 'long' in m.content %}(long){% endif \
                  %}{{ m.content }}{% endfor %}";
    let messages = json!([
        {"role": "user", "content": "a long story"},
        {"role": "assistant", "content": "short"},
    ]);
    let found = spans(
        source,
        &RenderArgs {
            add_generation_prompt: false,
            ..args(&messages)
        },
    );
    let expected = [
        (Part::User, Some(0), "<user>(long)a long story".to_owned()),
        (Part::Assistant, Some(1), "<assistant>short".to_owned()),
    ];
    assert_eq!(found, expected);
}
