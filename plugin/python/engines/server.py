"""vLLM's server as processes of its own, with and without Rootstock: server.py MODEL

The same requests to both, at temperature 0 with policy lru: texts, cached tokens and the kinds of
KV events must be equal. Prints both, and a line with the result.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

SYSTEM = "You are a careful assistant that follows rules. " * 40


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def post(url: str, body: dict) -> dict:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=300))


def requests() -> list[tuple[str, dict]]:
    chats = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Say {word}."}]
        for word in ("hello", "goodbye", "hello", "nothing")
    ]
    many = [
        ("chat/completions", {"messages": messages, "max_tokens": 24, "priority": turn})
        for turn, messages in enumerate(chats)
    ]
    story = "Once upon a time there was a fox. " * 20
    for turn in range(3):
        many.append(("completions", {"prompt": story * (turn + 1), "max_tokens": 40}))
    many.append(("completions", {"prompt": story, "max_tokens": 8, "cache_salt": "other"}))
    return many


def events_of(path: str, take) -> list[str]:
    """Kinds and numbers of blocks of the events that `take` brings about."""
    import msgspec
    import zmq

    hear = zmq.Context.instance().socket(zmq.SUB)
    hear.connect(path)
    hear.setsockopt_string(zmq.SUBSCRIBE, "kv")
    time.sleep(0.5)
    take()
    kinds = []
    while hear.poll(1500):
        _, _, payload = hear.recv_multipart()
        for event in msgspec.msgpack.decode(payload)[1]:
            fields = event if isinstance(event, dict) else {"type": event[0], "rest": event[1:]}
            hashes = fields.get("block_hashes") or (fields.get("rest") or [[]])[0]
            kinds.append(f"{fields['type']} {len(hashes)}")
    hear.close(0)
    return kinds


def serve(model: str, ours: bool) -> dict:
    port = free_port()
    folder = tempfile.mkdtemp()
    path = f"ipc://{folder}/kv"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": path, "topic": "kv"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model, "--served-model-name", "m", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048"]
    command += ["--block-size", "32", "--max-num-seqs", "16", "--enforce-eager"]
    command += ["--enable-prefix-caching", "--scheduling-policy", "priority"]
    command += ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    if ours:
        command += ["--scheduler-cls", "rootstock.vllm.scheduler"]
        command += ["--additional-config", '{"rootstock": {"policy": "lru", "log_s": 5}}']
    else:
        env["VLLM_PLUGINS"] = ""
    log = open(f"{folder}/log", "w")
    start = time.time()
    process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(url + "/health", timeout=2)
                break
            except OSError:
                if process.poll() is not None or time.time() - start > 400:
                    raise RuntimeError(open(f"{folder}/log").read()[-3000:]) from None
                time.sleep(1)
        ready_s, answers = time.time() - start, []

        def ask() -> None:
            for route, body in requests():
                body = body | {"model": "m", "temperature": 0}
                answer = post(f"{url}/v1/{route}", body)
                choice = answer["choices"][0]
                text = choice.get("text") or choice.get("message", {}).get("content")
                details = answer["usage"]["prompt_tokens_details"] or {}
                answers.append([text, details.get("cached_tokens")])

        kinds = events_of(path, ask)
    finally:
        process.terminate()
        process.wait(60)
    lines = [line for line in open(f"{folder}/log") if "Rootstock" in line]
    return {"ready_s": round(ready_s), "answers": answers, "events": kinds, "lines": lines}


def main(model: str) -> int:
    stock, ours = serve(model, False), serve(model, True)
    cached = [[answer[1] for answer in one["answers"]] for one in (stock, ours)]
    print("cached tokens, vLLM:     ", cached[0])
    print("cached tokens, Rootstock:", cached[1])
    print("events, vLLM:     ", stock["events"])
    print("events, Rootstock:", ours["events"])
    print("ready after s:", stock["ready_s"], ours["ready_s"])
    print("".join(ours["lines"]), end="")
    checks = {
        "texts": [a[0] for a in stock["answers"]] == [a[0] for a in ours["answers"]],
        "cached tokens": cached[0] == cached[1] and sum(cached[0]) > 0,
        "events": stock["events"] == ours["events"] and len(ours["events"]) > 0,
        "status line": any("holds the KV cache" in line for line in ours["lines"]),
        "stock is stock": not stock["lines"],
    }
    for name, good in checks.items():
        print(f"{name}: {'equal' if good else 'DIFFERENT'}")
    wrong = sum(not good for good in checks.values())
    state = "FAILED" if wrong else "ok"
    print(f"test result: {state}. {len(checks) - wrong} passed; {wrong} failed;")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
