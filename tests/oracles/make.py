"""Vocabularies and chat templates of three families, with what their own libraries make of texts.

From the packages of `run`: `tokenizer.json` and the chat template of Llama 3.1, Qwen2.5 and Mistral
Nemo. Each becomes a GGUF file without weights, as llama.cpp's converter writes it, and beside it
lines of JSON: texts with the ids that Hugging Face's `tokenizers` gives them, and conversations
with what Jinja2 renders of them, in the environment that `transformers` sets up.

Usage: make.py PACKAGES_FOLDER OUT_FOLDER
"""

import json
import os
import random
import struct
import sys

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

PRE = {"llama3_1": "llama-bpe", "qwen2_5": "qwen2", "mistral_nemo": "tekken"}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

TEXTS = [
    "",
    " ",
    "\n",
    "\t\t x",
    "Hello, world!",
    "I'm sure they've said we'll, don't, IT'S.",
    "12345 1 22 333 4444 3.14159 1e-5 0xFF",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    '{"name": "look", "arguments": {"path": "/tmp/a b.txt", "n": [1, 2, 3]}}',
    "Stra\u00dfe caf\u00e9 na\u00efve \u0153uvre \u0130stanbul",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0627\u0644\u0633\u0644\u0627\u0645 \u05e9\u05dc\u05d5\u05dd",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f \U0001f1e9\U0001f1ea",
    "a  b   c    d     e\n \n  \n   x",
    "trailing blanks   ",
    "https://example.com/a?b=c&d=%20#e (see [1]) -- ok...",
    "<|im_start|>user\nhi<|im_end|>\n<s>[INST] x [/INST]</s><|eot_id|><|begin_of_text|>",
    "CamelCaseWords andHTMLParsers XMLHttpRequest snake_case_name",
    "\r\nwindows\r\nlines\r\n",
    "\u00a0no\u2009break \u3000wide\u200bzero",
    "a/b//c\\d\\\\e///\n//\n",
    "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940 \u10e5\u10d0\u10e0\u10d7\u10e3\u10da\u10d8",
]

TOOL = {
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
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": " Weather in Paris? \n"}
SAID = {"role": "assistant", "content": "It rains."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}},
        }
    ],
}
RESULT = {"role": "tool", "content": "20 \u00b0C", "tool_call_id": "call00000", "name": "get_weather"}
TALKS = [
    ([USER], None),
    ([SYSTEM, USER], None),
    ([SYSTEM, USER, SAID, USER], None),
    ([SYSTEM, USER], [TOOL]),
    ([USER, CALL, RESULT], [TOOL]),
    ([SYSTEM, USER, CALL, RESULT, SAID, USER], [TOOL, TOOL]),
]


def mixed(count):
    """Texts put together from pieces of the others: the same in every run."""
    dice = random.Random(7)
    pieces = [piece for text in TEXTS for piece in (text[:5], text[3:11], text) if piece]
    return ["".join(dice.choices(pieces, k=dice.randint(2, 6))) for _ in range(count)]


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def gguf(path, fields):
    """A GGUF file of metadata alone."""
    out = [b"GGUF", struct.pack("<IQQ", 3, 0, len(fields))]
    for key, value in fields:
        out.append(text(key))
        if isinstance(value, bool):
            out.append(struct.pack("<I?", 7, value))
        elif isinstance(value, int):
            out.append(struct.pack("<II", 4, value))
        elif isinstance(value, str):
            out.append(struct.pack("<I", 8) + text(value))
        elif isinstance(value[0], int):
            out.append(struct.pack("<IIQ", 9, 5, len(value)))
            out.append(struct.pack("<%di" % len(value), *value))
        else:
            out.append(struct.pack("<IIQ", 9, 8, len(value)))
            out.extend(map(text, value))
    with open(path, "wb") as file:
        file.write(b"".join(out))


def name_of(token):
    return token["content"] if isinstance(token, dict) else token


def environment():
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )

    def tojson(value, indent=None):
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def raise_exception(message):
        raise ValueError(message)

    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: "26 Jul 2024"
    return made


def family(source, out, name):
    folder = os.path.join(source, name, "package", "models")
    with open(os.path.join(folder, "tokenizer.json")) as file:
        found = json.load(file)
    with open(os.path.join(folder, "tokenizer_config.json")) as file:
        config = json.load(file)
    ids = dict(found["model"]["vocab"])
    kinds = {token: NORMAL for token in ids}
    for token in found["added_tokens"]:
        ids[token["content"]] = token["id"]
        kinds[token["content"]] = CONTROL if token["special"] else USER_DEFINED
    tokens = sorted(ids, key=ids.get)
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    merges = [m if isinstance(m, str) else " ".join(m) for m in found["model"]["merges"]]
    bos, eos = config.get("bos_token"), config["eos_token"]
    fields = [
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", PRE[name]),
        ("tokenizer.ggml.tokens", tokens),
        ("tokenizer.ggml.token_type", [kinds[token] for token in tokens]),
        ("tokenizer.ggml.merges", merges),
        ("tokenizer.ggml.eos_token_id", ids[name_of(eos)]),
        ("tokenizer.ggml.add_bos_token", bool(bos)),
        ("tokenizer.chat_template", config["chat_template"]),
    ]
    if bos:
        fields.append(("tokenizer.ggml.bos_token_id", ids[name_of(bos)]))
    gguf(os.path.join(out, name + ".gguf"), fields)

    tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    encode = lambda words: tokenizer.encode(words, add_special_tokens=False).ids
    template = environment().from_string(config["chat_template"])
    with open(os.path.join(out, name + ".jsonl"), "w") as file:
        for words in TEXTS + mixed(200):
            file.write(json.dumps({"text": words, "ids": encode(words)}) + "\n")
        for messages, tools in TALKS:
            shown = template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=True,
                bos_token=name_of(bos) if bos else "",
                eos_token=name_of(eos),
            )
            talk = {"messages": messages, "tools": tools, "text": shown, "ids": encode(shown)}
            file.write(json.dumps(talk) + "\n")


for name in PRE:
    family(sys.argv[1], sys.argv[2], name)
