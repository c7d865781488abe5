"""What a long conversation costs beside its computation: CPU time by thread, request by request.

    rootstock serve --port 8131 &
    python3 benches/scripts/vertical.py 8131 PID WORDS.txt [--turns 9] [--requests 7]

Asks for one token after the same long prompt three times, then after ever longer ones, and prints
for each how long the server's threads ran: `tokio` is HTTP, JSON, template, tokenization and SSE,
`core` cache and scheduler, `engine` and `kernel` the model.
"""

import argparse
import json
import pathlib
import random
import urllib.request


def thread_ns(pid):
    """Nanoseconds that each thread ran, by name and id."""
    found = {}
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            found[name, task.name] = int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:
            continue
    return found


def ask(port, messages):
    """One streamed answer of one token: its usage and the bytes of the request."""
    options = {"max_tokens": 1, "temperature": 0, "stream": True}
    options["stream_options"] = {"include_usage": True}
    body = json.dumps({"model": "default", "messages": messages, **options}).encode()
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        lines = answer.read().decode().splitlines()
    usage = [line for line in lines if '"usage":{' in line]
    return json.loads(usage[-1].removeprefix("data: "))["usage"], len(body)


def main():
    """Asks and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("pid", type=int)
    parser.add_argument("words", type=pathlib.Path)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--requests", type=int, default=7)
    args = parser.parse_args()
    draw = random.Random(7)
    words = args.words.read_text(errors="replace").split()

    def message(role, count):
        return {"role": role, "content": " ".join(draw.choice(words) for _ in range(count))}

    messages = [message("system", 400)]
    for _turn in range(args.turns):
        messages += [message("user", 180), message("assistant", 120)]
    messages.append(message("user", 3))
    print("request,bytes,prompt tokens,cached,ms by thread")
    for number in range(args.requests):
        before = thread_ns(args.pid)
        usage, size = ask(args.port, messages)
        spent = {}
        for (name, task), ns in thread_ns(args.pid).items():
            spent[name] = spent.get(name, 0) + ns - before.get((name, task), 0)
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        times = " ".join(f"{name} {ns / 1e6:.2f}" for name, ns in sorted(spent.items()) if ns > 5e4)
        print(f"{number},{size},{usage['prompt_tokens']},{cached},{times}", flush=True)
        if number >= 2:
            messages += [message("assistant", 8), message("user", 30)]


if __name__ == "__main__":
    main()
