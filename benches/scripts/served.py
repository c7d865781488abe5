"""A server process of its own for one run of a script here, and what is asked of it.

Only the standard library is used.
"""

import http.client
import json
import re
import subprocess
import sys
import threading
import time

WORDS = (
    "river stone garden window paper silver morning engine letter orange mountain simple "
    "market yellow winter number travel island coffee mirror bridge forest answer pencil"
).split()


def text(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words))


def percentile(values, part):
    values = sorted(values)
    return values[min(int(len(values) * part), len(values) - 1)]


class Server:
    """Started with free choice of its port; `pages` of `page_tokens` tokens are its KV cache."""

    def __init__(self, binary, *flags):
        command = [binary, "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.pages = self.page_tokens = 0
        for line in self.process.stdout:
            if found := re.search(r"KV cache\s+(\d+) pages of (\d+) tokens", line):
                self.pages, self.page_tokens = int(found[1]), int(found[2])
            if found := re.search(r"http://([^:/\s]+):(\d+)", line):
                self.address = (found[1], int(found[2]))
                threading.Thread(target=self.process.stdout.read, daemon=True).start()
                return
        sys.exit(f"the server did not start: {' '.join(command)}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(60)

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection(*self.address, timeout=900)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        return connection.getresponse()

    def metric(self, name):
        page = self.request("GET", "/metrics").read().decode()
        return float(re.search(rf"^rootstock_{name}(?:{{.*}})? ([0-9.e+-]+)", page, re.M)[1])

    def counters(self, *names):
        return {name: int(self.metric(f"{name}_total")) for name in names}

    def chat(self, messages, max_tokens, **fields):
        """Seconds to the first piece of text, the answer, and its usage."""
        body = {
            "model": "auto", "messages": messages, "max_tokens": max_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, **fields,
        }
        start = time.perf_counter()
        response = self.request("POST", "/v1/chat/completions", body)
        if response.status != 200:
            sys.exit(f"{response.status}: {response.read().decode()}")
        first, answer, usage = None, [], {}
        for line in response:
            line = line.decode().strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[len("data: "):])
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                delta = choice["delta"]
                if delta.get("content") or delta.get("reasoning_content"):
                    first = first or time.perf_counter() - start
                answer.append(delta.get("content") or "")
        return first, "".join(answer), usage
