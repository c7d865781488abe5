"""Agent programs against the whole server, with a scripted engine that plays the model.

Each program runs without a person, in a fresh home and folder, against a fresh server: a tool call,
two calls at once, then text. Whoever runs this has put it into a network namespace that has
loopback only; names that programs look up are told apart and never answered.

Usage: sessions.py SCRIPTED_SERVER TOOLS_FOLDER [NAME..]. Prints results in the form of Rust's test
harness, and how much of the prompts of turns 2 and later was cached.
"""

import glob
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

BASE = "http://127.0.0.1:8787"
DONE = "All is done."
TESTS = []
NAMES = set()
SERVER, TOOLS = os.path.realpath(sys.argv[1]), os.path.realpath(sys.argv[2])
NPM = os.path.join(TOOLS, "node_modules", ".bin")


def test(function):
    TESTS.append(function)
    return function


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


class World:
    """A server with a script, a home and a folder to work in."""

    def __init__(self, script, files=None):
        self.root = tempfile.mkdtemp()
        self.home, self.folder = self.sub("home"), self.sub("project")
        for path, text in {"hello.txt": "hello\n", **(files or {})}.items():
            self.write("project/" + path, text)
        self.script, self.lines = script, []
        self.server = None

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
        text = json.dumps(self.script).replace("$FOLDER", self.folder)
        path = self.write("script.json", text)
        self.server = subprocess.Popen(
            [SERVER, "8787", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", 8787)).close()
                return self
            except OSError:
                time.sleep(0.05)
        raise AssertionError("the server did not start: %s" % self.lines)

    def read(self):
        for line in self.server.stdout:
            self.lines.append(line.rstrip())

    def __exit__(self, *error):
        self.server.kill()
        self.server.wait()
        self.reader.join()
        if error[0] is not None:
            print("\n".join(self.lines[-20:]))
        shutil.rmtree(self.root, ignore_errors=True)

    def run(self, *command, limit_s=200, cwd=None, **variables):
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
            cwd=cwd or self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=limit_s,
        )
        shown = "%s\n%s" % (done.stdout[-1500:], done.stderr[-1500:])
        assert done.returncode == 0, "exit %d: %s" % (done.returncode, shown)
        return done.stdout

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


def three_turns(marker, shell, read, tools=True):
    first, second = shell("ls"), shell("cat hello.txt") + "\n" + read
    part = {"marker": marker, "turns": [first, second, DONE]}
    if tools:
        part["tools"] = True
    return [part, {"marker": "", "turns": ["Looking around"]}]


def binary(pattern):
    """The binary of the platform's own package; what npm links needs a script to run first."""
    return sorted(glob.glob(os.path.join(TOOLS, "node_modules", pattern)))[0]


def claude(world, *arguments, **more):
    return world.run(
        binary("@anthropic-ai/*/claude"),
        "-p",
        *arguments,
        "--allowedTools",
        "Bash,Read,Task,Agent",
        "--output-format",
        "json",
        ANTHROPIC_BASE_URL=BASE,
        ANTHROPIC_AUTH_TOKEN="none",
        DISABLE_TELEMETRY="1",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        **more,
    )


def bash(command):
    return call("Bash", command=command, description="Look")


CLAUDE = three_turns("TASK-A", bash, call("Read", file_path="$FOLDER/hello.txt"))


@test
def claude_code():
    with World(CLAUDE) as world:
        result = json.loads(claude(world, "TASK-A: look around."))
        assert result["result"] == DONE and not result["is_error"], result
        shares = world.share("TASK-A")
        again = json.loads(claude(world, "--continue", "And TASK-A once more?"))
        assert again["result"] == DONE, again
        return shares


@test
def claude_code_across_sessions():
    """The digits of the billing line follow the prompt: other servers find nothing here."""
    with World(CLAUDE) as world:
        claude(world, "TASK-A: look around.")
        before = len(world.turns("TASK-A"))
        claude(world, "Another wish altogether: TASK-A, see what is here.")
        turn, prompt, cached = world.turns("TASK-A")[before]
        assert turn == 1 and 2 * cached > prompt, (turn, prompt, cached)
        return "first turn of the second session: %.1f %% of %d" % (100 * cached / prompt, prompt)


@test
def claude_code_siblings():
    spawn = lambda name: call(
        "Agent", description="Look", prompt="TASK-KID %s" % name, subagent_type="general-purpose"
    )
    script = [
        {
            "marker": "TASK-PARENT",
            "tools": True,
            "turns": [spawn("one") + "\n" + spawn("two"), DONE],
        },
        {"marker": "TASK-KID", "tools": True, "turns": [bash("ls"), "Seen."]},
        {"marker": "", "turns": ["Looking around"]},
    ]
    with World(script) as world:
        result = json.loads(claude(world, "TASK-PARENT: let two agents look."))
        assert result["result"] == DONE, result
        first = [(p, c) for turn, p, c in world.turns("TASK-KID") if turn == 1]
        assert len(first) == 2, first
        # How much the second finds depends on how far the first has come when it arrives.
        prompt, cached = max(first, key=lambda one: one[1])
        assert 10 * cached > prompt, first
        later = [(p, c) for turn, p, c in world.turns("TASK-KID") if turn == 2]
        assert len(later) == 2 and all(10 * c > 9 * p for p, c in later), later
        return "the second child's first turn: %.1f %% of %d" % (100 * cached / prompt, prompt)


@test
def codex():
    run = lambda command: call("exec_command", cmd=command)
    script = three_turns("TASK-A", run, run("cat hello.txt"))
    with World(script) as world:
        world.write(
            "home/.codex/config.toml",
            'model = "any"\nmodel_provider = "local"\n[model_providers.local]\nname = "local"\n'
            'base_url = "%s/v1"\nenv_key = "KEY"\nwire_api = "responses"\n' % BASE,
        )
        program = [os.path.join(NPM, "codex"), "exec", "--skip-git-repo-check"]
        program += ["--sandbox", "danger-full-access"]
        assert DONE in world.run(*program, "TASK-A: look around.", KEY="none")
        shares = world.share("TASK-A")
        assert DONE in world.run(*program, "resume", "--last", "And TASK-A again?", KEY="none")
        return shares


@test
def opencode():
    run = lambda command: call("bash", command=command, description="Look")
    script = three_turns("TASK-A", run, call("read", filePath="$FOLDER/hello.txt"))
    with World(script) as world:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Local",
            "options": {"baseURL": BASE + "/v1", "apiKey": "none"},
            "models": {"any": {"name": "any", "limit": {"context": 200000, "output": 8000}}},
        }
        config = {"provider": {"local": provider}, "autoupdate": False, "share": "disabled"}
        world.write("home/.config/opencode/opencode.json", json.dumps(config))
        program = [binary("opencode-linux-*/bin/opencode"), "run", "-m", "local/any"]
        assert DONE in world.run(*program, "TASK-A: look around.")
        shares = world.share("TASK-A")
        assert DONE in world.run(*program, "--continue", "And TASK-A again?")
        return shares


@test
def qwen_code():
    run = lambda command: call("run_shell_command", command=command, is_background=False)
    script = three_turns("TASK-A", run, call("read_file", file_path="$FOLDER/hello.txt"))
    with World(script) as world:
        said = world.run(
            os.path.join(NPM, "qwen"),
            "--auth-type",
            "openai",
            "--yolo",
            "-p",
            "TASK-A: look around.",
            OPENAI_API_KEY="none",
            OPENAI_BASE_URL=BASE + "/v1",
            OPENAI_MODEL="any",
            QWEN_TELEMETRY_ENABLED="false",
        )
        assert DONE in said, said
        return world.share("TASK-A")


def edit(old, new):
    return (
        "hello.txt\n```\n<<<<<<< SEARCH\n%s\n=======\n%s\n>>>>>>> REPLACE\n```\n" % (old, new)
    )


@test
def aider():
    """Edits are text here: the first does not fit, the second fails the check, the third passes."""
    one, two, three = edit("not there", "x"), edit("hello", "good"), edit("good", "good day")
    # The program puts answers of its own between ours, so ours are the first, fourth and seventh.
    turns = [one] * 3 + [two] * 3 + [three]
    script = [
        {"marker": "TASK-A", "unless": "Git commit message", "turns": turns},
        {"marker": "", "turns": ["Say good day"]},
    ]
    with World(script) as world:
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.invalid"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "begin"]):
            world.run(*git, *words)
        world.run("git", "config", "user.name", "a")
        world.run("git", "config", "user.email", "a@example.invalid")
        world.run(
            os.path.join(TOOLS, "aider", "bin", "aider"),
            "--model",
            "openai/any",
            "--edit-format",
            "diff",
            "--yes-always",
            "--no-check-update",
            "--analytics-disable",
            "--no-show-model-warnings",
            "--auto-test",
            "--test-cmd",
            "grep day hello.txt",
            "--message",
            "TASK-A: say good day.",
            "hello.txt",
            OPENAI_API_BASE=BASE + "/v1",
            OPENAI_API_KEY="none",
        )
        with open(os.path.join(world.folder, "hello.txt")) as file:
            assert file.read() == "good day\n"
        assert "Say good day" in world.run("git", "log", "--oneline"), "the commit message is ours"
        return world.share("TASK-A", turns=(1, 4, 7))


def main():
    threading.Thread(target=answer_names, daemon=True).start()
    wanted = sys.argv[3:]
    passed = failed = 0
    for function in TESTS:
        if wanted and function.__name__ not in wanted:
            continue
        NAMES.clear()
        begun = time.monotonic()
        try:
            told = function()
            passed += 1
            asked = ", %d names looked up in vain" % len(NAMES) if NAMES else ""
            told += " cached%s, %.0f s" % (asked, time.monotonic() - begun)
            print("test agents::%s ... ok (%s)" % (function.__name__, told))
        except Exception:
            failed += 1
            print("test agents::%s ... FAILED" % function.__name__)
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
    state = "FAILED" if failed else "ok"
    print("test result: %s. %d passed; %d failed; 0 ignored;" % (state, passed, failed))
    sys.exit(1 if failed else 0)


main()
