#!/usr/bin/env python3
"""Writes text_tokens.json: the ids that llama.cpp gives a list of texts with the default model.

    pip install xllamacpp    # llama.cpp as a Python module
    python3 text_tokens.py SmolLM2-135M-Instruct.Q4_1.gguf > text_tokens.json

The texts are our own. llama.cpp's tokenizer shares no code with the `tokenizers` crate, which is
what makes it an oracle.
"""

import json
import sys
import urllib.request

import xllamacpp

TEXTS = [
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    " leading space",
    "trailing space ",
    "  two  spaces   three    four",
    "line one\nline two\n\nline four\r\nwindows",
    "\ttab\t\ttabs \t mixed",
    "\n",
    "\n\n\n\n",
    "   ",
    "   \n   x",
    "1234567890 3.14159 1,000,000 2026-01-31",
    "x1y22z333",
    "\u0663\u0664 \u00bd \u2167 \u4e09",
    "it's we'll I'd they've you're can't I'm O'Neil 'Tis IT'S",
    "caf\u00e9 na\u00efve \u00fcber stra\u00dfe \u0130stanbul",
    "cafe\u0301 combining",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": None}  # done\n",
    "for (int i = 0; i < 10; ++i) { printf(\"%d\\n\", i); }",
    "https://example.com/path?query=1&other=two#frag",
    "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more <|im_start|> <|im_end|>",
    "<|im_start|",
    "<|im_start|><|im_start|>",
    "<repo_name>a/b<file_sep>c <jupyter_code>",
    "\u00a0non\u00a0breaking\u2003em\u200bzero",
    "!!! ??? ... --- *** ### $$$ %%% &&& ((( )))",
    "a" * 300,
    "\u20ac" * 40,
    "CamelCaseWord snake_case_word kebab-case-word SCREAMING",
]


def main() -> None:
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx = 256
    params.warmup = False
    server = xllamacpp.Server(params)
    address = server.listening_address
    cases = []
    for text in TEXTS:
        for special in (True, False):
            body = {"content": text, "add_special": False, "parse_special": special}
            request = urllib.request.Request(
                f"{address}/tokenize",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                ids = json.load(answer)["tokens"]
            cases.append({"text": text, "special": special, "ids": ids})
    print("[")
    print(",\n".join(json.dumps(case) for case in cases))
    print("]")


main()
