"""Agents that walk through conversations and know what each turn must answer."""

import collections
import http.client
import json
import socket
import struct

WORDS = (
    "river stone garden window paper silver morning engine letter orange mountain simple "
    "market yellow winter number travel island coffee mirror bridge forest answer pencil"
).split()
COUNT, TURNS, OUTPUT_TOKENS = 40, 4, 24
NONSENSE = [
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": 5}]}'),
    ("/v1/messages", b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": -1}'),
    ("/v1/completions", b'{"prompt": "a", "temperature": 9}'),
    ("/v1/responses", b'{"input": [{"type": "never"}]}'),
    ("/v1/kv/actions", b'{"actions": 1}'),
]


class Conversations:
    """System prompts that some share, questions, and the answers once they are learned."""

    def __init__(self, rng):
        systems = [" ".join(rng.choices(WORDS, k=120)) for _ in range(COUNT // 4)]
        self.all = [
            (rng.choice(systems), [" ".join(rng.choices(WORDS, k=50)) for _ in range(TURNS)], [])
            for _ in range(COUNT)
        ]

    def learn(self, address):
        """Has a server say every answer, and keeps the conversations that any server continues so.

        What a server has said itself it knows as tokens; the same text from a client it splits
        anew, maybe into other tokens, after which another answer may be right. Kept are those
        whose answers split as they were said.
        """
        self.all = [one for one in self.all if all(
            self.say(address, one, turn) for turn in range(TURNS))]
        assert self.all, "no answer splits as it was said"

    @staticmethod
    def say(address, conversation, turn):
        system, questions, answers = conversation
        body = chat_body(system, messages(questions, answers, turn))
        body["nvext"] = {"extra_fields": ["completion_token_ids"]}
        status, text = ask(address, "/v1/chat/completions", body)
        assert status == 200, text
        answer = json.loads(text)
        answers.append(chat_text(answer))
        body = {"prompt": answers[-1], "add_special_tokens": False}
        split = json.loads(ask(address, "/tokenize", body)[1])["tokens"]
        return answer["nvext"]["completion_token_ids"][:len(split)] == split


def messages(questions, answers, turn):
    said = []
    for at in range(turn):
        said.append({"role": "user", "content": questions[at]})
        said.append({"role": "assistant", "content": answers[at]})
    return [*said, {"role": "user", "content": questions[turn]}]


def ask(address, path, body, **headers):
    connection = http.client.HTTPConnection(*address, timeout=300)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"content-type": "application/json", **headers}
        connection.request("POST", path, data, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def chat_body(system, said):
    return {"model": "m", "messages": [{"role": "system", "content": system}, *said],
            "max_tokens": OUTPUT_TOKENS, "temperature": 0}


def chat_text(answer):
    return answer["choices"][0]["message"]["content"]


def chat_delta(event):
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def claude_body(system, said):
    return {"model": "m", "system": system, "messages": said,
            "max_tokens": OUTPUT_TOKENS, "temperature": 0}


def claude_text(answer):
    return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


def claude_delta(event):
    return event["delta"]["text"] if event.get("type") == "content_block_delta" else ""


def responses_body(system, said):
    return {"model": "m", "instructions": system, "input": said, "store": False,
            "max_output_tokens": OUTPUT_TOKENS, "temperature": 0}


def responses_text(answer):
    parts = [part for item in answer["output"] for part in item.get("content", ())]
    return "".join(part["text"] for part in parts)


def responses_delta(event):
    return event["delta"] if event.get("type") == "response.output_text.delta" else ""


ROUTES = [
    ("/v1/chat/completions", chat_body, chat_text, chat_delta),
    ("/v1/messages", claude_body, claude_text, claude_delta),
    ("/v1/responses", responses_body, responses_text, responses_delta),
]


class Agent:
    """One of those who use the server at the same time."""

    def __init__(self, address, conversations, rng, stop):
        self.address, self.conversations = address, conversations.all
        self.rng, self.stop = rng, stop
        self.counts = collections.Counter(answered=0)
        self.wrong, self.refused = [], []
        self.program = "none yet"

    def run(self):
        while not self.stop.is_set():
            at = self.rng.randrange(len(self.conversations))
            system, questions, answers = self.conversations[at]
            self.program = f"{at}-{self.rng.randrange(1 << 30)}"
            for turn in range(TURNS):
                if self.stop.is_set():
                    return
                said = messages(questions, answers, turn)
                try:
                    self.turn(system, said, answers[turn], self.hints(), turn == TURNS - 1)
                except (OSError, http.client.HTTPException) as error:
                    self.refused.append(repr(error))

    def hints(self):
        hints = {"priority": self.rng.randrange(-2, 3), "program_id": self.program}
        if self.rng.random() < 0.2:
            hints["latency_sensitivity"] = 2.0
        if self.rng.random() < 0.3:
            hints["speculative_prefill"] = True
        nvext = {"agent_hints": hints}
        if self.rng.random() < 0.2:
            nvext["cache_control"] = {"type": "ephemeral", "ttl": f"{self.rng.randrange(2, 20)}s"}
        return nvext

    def turn(self, system, said, expected, nvext, last):
        path, body_of, text_of, delta_of = self.rng.choice(ROUTES)
        body = {**body_of(system, said), "nvext": nvext}
        fate = self.rng.random()
        if fate < 0.03:
            return self.nonsense()
        if fate < 0.15:
            return self.hang_up(path, {**body, "stream": True})
        body["stream"] = self.rng.random() < 0.6
        final = {"x-dynamo-session-final": "true"} if last and self.rng.random() < 0.5 else {}
        status, answer = ask(self.address, path, body, **final)
        if status != 200:
            return self.refused.append(f"{path}: {status} {answer[:200]}")
        if body["stream"]:
            text = "".join(delta_of(event) for event in events(answer))
        else:
            text = text_of(json.loads(answer))
        self.counts["answered"] += 1
        if text != expected:
            self.wrong.append(f"{path}: {text!r} instead of {expected!r}; {answer[-700:]}")

    def nonsense(self):
        path, body = self.rng.choice(NONSENSE)
        status, answer = ask(self.address, path, body)
        self.counts["nonsense"] += 1
        if not 400 <= status < 500:
            self.refused.append(f"nonsense at {path} was answered {status} {answer[:200]}")

    def hang_up(self, path, body):
        """Leaves at any moment, politely or not."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data)}\r\n" \
               "content-type: application/json\r\n\r\n"
        with socket.create_connection(self.address, timeout=300) as connection:
            if self.rng.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sent = head.encode() + data
            if self.rng.random() < 0.1:
                connection.sendall(sent[:self.rng.randrange(len(sent))])
            else:
                connection.sendall(sent)
                for _ in range(self.rng.randrange(6)):
                    connection.recv(200)
        self.counts["hung up"] += 1


def events(answer):
    for line in answer.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[len("data: "):])
