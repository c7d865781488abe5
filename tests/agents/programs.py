"""The agent programs and the world in which each of them runs: a server, a home, a folder.

Every program runs without a person and believes to speak with its vendor; it is pointed at
`World.base`. Ports are fixed, because whoever runs this has put it into a network namespace of its
own. With `watched=True` the program speaks through a relay that notes each request and what came of
it.
"""

import glob
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time

PORT, RELAY_PORT = 8787, 8786
NAMES = set()


def answer_names():
    """A name server that knows nothing and remembers what it was asked."""
    ear = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    ear.bind(("127.0.0.1", 53))
    while True:
        question, asker = ear.recvfrom(2048)
        at, labels = 12, []
        while question[at]:
            labels.append(question[at + 1 : at + 1 + question[at]].decode())
            at += 1 + question[at]
        NAMES.add(".".join(labels))
        head = question[:2] + b"\x81\x83" + question[4:6] + bytes(6)
        ear.sendto(head + question[12 : at + 5], asker)


def call(name, **arguments):
    return "<tool_call>\n%s\n</tool_call>" % json.dumps({"name": name, "arguments": arguments})


class Relay:
    """Passes connections on and notes requests and the statuses of answers, with their times."""

    def __init__(self):
        self.seen = []
        self.ear = socket.create_server(("127.0.0.1", RELAY_PORT))
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.ear.accept()
                server = socket.create_connection(("127.0.0.1", PORT))
            except OSError:
                return
            for ends in ((client, server, False), (server, client, True)):
                threading.Thread(target=self.pass_on, args=ends, daemon=True).start()

    def pass_on(self, source, sink, is_answer):
        pattern = rb"HTTP/1\.1 (\d{3})" if is_answer else rb"(?:POST|GET|HEAD) (\S+) HTTP/1\.1\r"
        try:
            while data := source.recv(1 << 16):
                for found in re.findall(pattern, data):
                    self.seen.append((time.monotonic(), is_answer, found.decode()))
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self):
        # A close alone leaves the port taken while another thread waits for connections.
        self.ear.shutdown(socket.SHUT_RDWR)
        self.ear.close()

    def answers(self, status):
        """When answers of this status came."""
        return [at for at, is_answer, found in self.seen if is_answer and found == str(status)]

    def asked(self):
        """When completions were asked for, and by which path."""
        paths = ("messages", "responses", "completions")
        return [
            (at, path.split("?")[0])
            for at, is_answer, path in self.seen
            if not is_answer and path.split("?")[0].endswith(paths)
        ]


class World:
    """A server that plays a script, or the real one on the default model; a home, a folder."""

    def __init__(self, tools, server, script=None, options=None, watched=False):
        self.tools, self.command, self.script = tools, [server], script
        self.options, self.watched = options or {}, watched
        self.root = tempfile.mkdtemp()
        self.home, self.folder = self.sub("home"), self.sub("project")
        self.write("project/hello.txt", "hello\n")
        self.lines, self.server, self.relay = [], None, None
        self.base = "http://127.0.0.1:%d" % (RELAY_PORT if watched else PORT)

    def sub(self, name):
        path = os.path.join(self.root, name)
        os.makedirs(path, exist_ok=True)
        return path

    def write(self, path, text):
        path = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
        return path

    def __enter__(self):
        if self.script is None:
            self.command += ["--port", str(PORT), "--max-model-len", "32768"]
            self.command += ["--kv-cache-mib", "2048", "--max-output-tokens", "200"]
        else:
            text = json.dumps(self.script).replace("$FOLDER", self.folder)
            self.command += [str(PORT), self.write("script.json", text), json.dumps(self.options)]
        self.server = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        for _ in range(1200):
            try:
                socket.create_connection(("127.0.0.1", PORT)).close()
                break
            except OSError:
                time.sleep(0.05)
        else:
            raise AssertionError("the server did not start: %s" % self.lines)
        self.relay = Relay() if self.watched else None
        return self

    def read(self):
        for line in self.server.stdout:
            self.lines.append(line.rstrip())

    def __exit__(self, *error):
        if self.relay:
            self.relay.close()
        self.server.kill()
        self.server.wait()
        self.reader.join()
        if error[0] is not None:
            print("\n".join(self.lines[-20:]))
        shutil.rmtree(self.root, ignore_errors=True)

    def run(self, *command, limit_s=200, well=True, **variables):
        """Runs a program to its end and gives what it printed."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": self.home,
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            **variables,
        }
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=limit_s,
        )
        shown = "%s\n%s" % (done.stdout[-1500:], done.stderr[-1500:])
        if well:
            assert done.returncode == 0, "exit %d: %s" % (done.returncode, shown)
            return done.stdout
        return shown

    def metric(self, name):
        """The sum of a counter over its labels."""
        ask = "GET /metrics HTTP/1.0\r\nhost: here\r\n\r\n"
        with socket.create_connection(("127.0.0.1", PORT)) as connection:
            connection.sendall(ask.encode())
            text = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
        found = re.findall(r"^%s(?:\{.*\})? ([0-9.e+]+)$" % name, text, re.MULTILINE)
        return sum(map(float, found))

    def turns(self, marker):
        """Prompt tokens and cached tokens of each request that a part of the script answered."""
        pattern = re.compile(r'turn "(.*)" (\d+) prompt (\d+) cached (\d+)')
        found = [pattern.fullmatch(line) for line in self.lines]
        return [
            (int(turn[2]), int(turn[3]), int(turn[4]))
            for turn in found
            if turn and turn[1] == marker
        ]

    def share(self, marker, turns=(1, 2, 3)):
        """The cached share of the turns after the first; all of them have to be there."""
        found = self.turns(marker)
        assert {turn for turn, _, _ in found} >= set(turns), (marker, found)
        later = [(p, c) for turn, p, c in found if turn > 1]
        prompt, cached = sum(p for p, _ in later), sum(c for _, c in later)
        return "%.1f %% of %d prompt tokens" % (100 * cached / prompt, prompt)

    def binary(self, pattern):
        """The binary of the platform's own package; what npm links needs a script to run first."""
        return sorted(glob.glob(os.path.join(self.tools, "node_modules", pattern)))[0]

    def linked(self, name):
        return os.path.join(self.tools, "node_modules", ".bin", name)


def claude_code(world, *words, **more):
    """Claude Code; gives the text of its result."""
    said = world.run(
        world.binary("@anthropic-ai/*/claude"),
        "-p",
        *words,
        "--allowedTools",
        "Bash,Read,Task,Agent",
        "--output-format",
        "json",
        ANTHROPIC_BASE_URL=world.base,
        ANTHROPIC_AUTH_TOKEN="none",
        DISABLE_TELEMETRY="1",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        **more,
    )
    if not more.get("well", True):
        return said
    result = json.loads(said)
    assert not result["is_error"], result
    return result["result"]


def codex(world, *words, **more):
    world.write(
        "home/.codex/config.toml",
        'model = "any"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
        'base_url = "%s/v1"\nenv_key = "KEY"\nwire_api = "responses"\n' % world.base,
    )
    program = [world.linked("codex"), "exec", "--skip-git-repo-check"]
    program += ["--sandbox", "danger-full-access"]
    return world.run(*program, *words, KEY="none", **more)


def opencode(world, *words, **more):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Local",
        "options": {"baseURL": world.base + "/v1", "apiKey": "none"},
        "models": {"any": {"name": "any", "limit": {"context": 200000, "output": 8000}}},
    }
    config = {"provider": {"local": provider}, "autoupdate": False, "share": "disabled"}
    world.write("home/.config/opencode/opencode.json", json.dumps(config))
    program = [world.binary("opencode-linux-*/bin/opencode"), "run", "-m", "local/any"]
    return world.run(*program, *words, **more)


def qwen_code(world, *words, **more):
    return world.run(
        world.linked("qwen"),
        "--auth-type",
        "openai",
        "--yolo",
        "-p",
        *words,
        OPENAI_API_KEY="none",
        OPENAI_BASE_URL=world.base + "/v1",
        OPENAI_MODEL="any",
        QWEN_TELEMETRY_ENABLED="false",
        **more,
    )


def aider(world, wish, *words, **more):
    """aider in a repository of its own; its test passes when hello.txt says day."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.invalid"]
    for step in (["init", "-q"], ["add", "."], ["commit", "-qm", "begin"]):
        world.run(*git, *step)
    world.run("git", "config", "user.name", "a")
    world.run("git", "config", "user.email", "a@example.invalid")
    return world.run(
        os.path.join(world.tools, "aider", "bin", "aider"),
        "--model",
        "openai/any",
        "--edit-format",
        "diff",
        "--yes-always",
        "--no-check-update",
        "--analytics-disable",
        "--no-show-model-warnings",
        *words,
        "--message",
        wish,
        "hello.txt",
        OPENAI_API_BASE=world.base + "/v1",
        OPENAI_API_KEY="none",
        **more,
    )


# In the order in which they are told about.
PROGRAMS = {
    "claude_code": claude_code,
    "codex": codex,
    "opencode": opencode,
    "qwen_code": qwen_code,
    "aider": aider,
}


def run_tests(tests, wanted):
    """Runs tests one after the other and prints what came of them as Rust's test harness does."""
    import sys
    import traceback

    threading.Thread(target=answer_names, daemon=True).start()
    passed = failed = 0
    for name, function in tests:
        if wanted and name not in wanted:
            continue
        NAMES.clear()
        begun = time.monotonic()
        try:
            told = function()
            passed += 1
            asked = ", %d names looked up in vain" % len(NAMES) if NAMES else ""
            told += "%s, %.0f s" % (asked, time.monotonic() - begun)
            print("test agents::%s ... ok (%s)" % (name, told))
        except Exception:
            failed += 1
            print("test agents::%s ... FAILED" % name)
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
    state = "FAILED" if failed else "ok"
    print("test result: %s. %d passed; %d failed; 0 ignored;" % (state, passed, failed))
    sys.exit(1 if failed else 0)
