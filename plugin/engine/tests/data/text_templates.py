#!/usr/bin/env python3
"""Writes text_templates.json: chat templates of our own with the texts that Jinja2 renders.

    pip install jinja2
    python3 text_templates.py > text_templates.json

The environment is the one that Hugging Face's transformers sets up for chat templates. The
templates use what real ones use: string methods, slices, macros, namespaces, loop controls,
`tojson`, tests, `raise_exception`.
"""

import json

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not ns.seen %}
        {%- set ns.seen = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and thought %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
                {%- if call.arguments is string %}
                    {{- call.arguments }}
                {%- else %}
                    {{- call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

STRICT = """{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% if m['role'] == 'user' %}{{ '[INST] ' ~ m['content'] | trim ~ ' [/INST]' }}{% else %}{{ ' ' ~ m['content'].strip() ~ eos_token }}{% endif %}{% endfor %}"""

ODDS = """{% macro show(value, depth=0) -%}
{%- if value is mapping -%}
{%- for key, item in value.items() -%}{{ '  ' * depth }}{{ key }}={{ show(item, depth + 1) }};{%- endfor -%}
{%- elif value is iterable and value is not string -%}
[{%- for item in value -%}{{ show(item, depth) }}{{ ',' if not loop.last }}{%- endfor -%}]
{%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{% for message in messages %}
  {% if message.role == 'skip' %}
    {% continue %}
  {% endif %}
  {% if message.role == 'stop' %}
    {% break %}
  {% endif %}
{{ loop.index }}:{{ message.role | upper }}:{{ show(message.content) }}
{% endfor %}
{{ tools | tojson(indent=4) if tools else 'none' }}
{{ extra_list | default([]) | join('+') }} {{ missing }}|{{ messages | map(attribute='role') | list | length }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ 'a-b'.replace('-', ' ').title() }}
{{ "x" if messages[-1].content is none else "y" }} {{ none }} {{ true }} {{ 1.5 }} {{ 7 // 2 }} {{ 2 ** 3 }}
"""

TOOL_DEFS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <now> & 'then' \u00e9\u4f60",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "empty", "parameters": {}, "list": [], "n": 1.5}},
]

CALLS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Paris?"},
    {
        "role": "assistant",
        "content": "<think>\nI call it.\n</think>\n\nLooking.",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}},
            {"function": {"name": "get_weather", "arguments": "{\"city\": \"Rome\"}"}},
        ],
    },
    {"role": "tool", "content": "Sunny <b>20</b>"},
    {"role": "tool", "content": "Rain"},
]

CASES = [
    ("chatml", CHATML, {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": " Hi \n"}], "add_generation_prompt": True}),
    ("chatml without generation prompt", CHATML, {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "A"}], "add_generation_prompt": False}),
    ("tools and calls", TOOLS, {"messages": CALLS, "tools": TOOL_DEFS, "add_generation_prompt": True}),
    ("no tools, no thinking", TOOLS, {"messages": CALLS + [{"role": "user", "content": "And?"}], "add_generation_prompt": True, "extra": {"enable_thinking": False}}),
    ("strict", STRICT, {"messages": [{"role": "user", "content": " a "}, {"role": "assistant", "content": " b "}, {"role": "user", "content": "c"}], "add_generation_prompt": True}),
    ("strict refuses", STRICT, {"messages": [{"role": "assistant", "content": "a"}], "add_generation_prompt": False}),
    ("odds", ODDS, {"messages": [{"role": "user", "content": {"k": [1, "two", {"x": None}], "z": True}}, {"role": "skip", "content": "-"}, {"role": "tool", "content": ["a", "b"]}, {"role": "stop", "content": "-"}, {"role": "user", "content": None}], "tools": TOOL_DEFS, "add_generation_prompt": False, "extra": {"extra_list": [1, 2]}}),
    ("odds without tools", ODDS, {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}),
]


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise TemplateError(message)


def main() -> None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    cases = []
    for name, source, args in CASES:
        case = {"name": name, "template": source, **args}
        variables = {**args.get("extra", {}), **args, "tools": args.get("tools")}
        variables.pop("extra", None)
        try:
            case["text"] = environment.from_string(source).render(
                **variables, bos_token="", eos_token=""
            )
        except TemplateError as error:
            case["raised"] = str(error)
        cases.append(case)
    print(json.dumps(cases, indent=1))


main()
