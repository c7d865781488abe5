"""Agent programs against the whole server, with a scripted engine that plays the model.

Each program runs without a person, in a fresh home and folder, against a fresh server: a tool call,
two calls at once, then text. Whoever runs this has put it into a network namespace that has
loopback only; names that programs look up are told apart and never answered.

Usage: sessions.py SCRIPTED_SERVER TOOLS_FOLDER [NAME..]. Prints results in the form of Rust's test
harness, and how much of the prompts of turns 2 and later was cached.
"""

import os
import sys

import programs
from programs import call, run_tests
from trouble import troubles

DONE = "All is done."
TESTS = []
SERVER, TOOLS = os.path.realpath(sys.argv[1]), os.path.realpath(sys.argv[2])


def test(function):
    TESTS.append((function.__name__, function))
    return function


def World(script):
    return programs.World(TOOLS, SERVER, script)


def three_turns(marker, shell, read, tools=True):
    first, second = shell("ls"), shell("cat hello.txt") + "\n" + read
    part = {"marker": marker, "turns": [first, second, DONE]}
    if tools:
        part["tools"] = True
    return [part, {"marker": "", "turns": ["Looking around"]}]


def bash(command):
    return call("Bash", command=command, description="Look")


CLAUDE = three_turns("TASK-A", bash, call("Read", file_path="$FOLDER/hello.txt"))


@test
def claude_code():
    with World(CLAUDE) as world:
        assert programs.claude_code(world, "TASK-A: look around.") == DONE
        shares = world.share("TASK-A")
        assert programs.claude_code(world, "--continue", "And TASK-A once more?") == DONE
        return shares + " cached"


@test
def claude_code_across_sessions():
    """The digits of the billing line follow the prompt: other servers find nothing here."""
    with World(CLAUDE) as world:
        programs.claude_code(world, "TASK-A: look around.")
        before = len(world.turns("TASK-A"))
        programs.claude_code(world, "Another wish altogether: TASK-A, see what is here.")
        turn, prompt, cached = world.turns("TASK-A")[before]
        assert turn == 1 and 2 * cached > prompt, (turn, prompt, cached)
        share = 100 * cached / prompt
        return "first turn of the second session: %.1f %% of %d cached" % (share, prompt)


@test
def claude_code_compaction():
    """The request for a summary reads the conversation from the cache; what follows, its head.

    The model has a name of ours: of the program's own choice a resumed session tells another
    variant in its system prompt than the session did, and finds 5 % of it.
    """
    with World(CLAUDE) as world:
        name = {"ANTHROPIC_MODEL": "any"}
        programs.claude_code(world, "TASK-A: look around.", **name)
        before = {at: len(world.turns(at)) for at in ("TASK-A", "")}
        programs.claude_code(world, "--continue", "/compact", **name)
        summary = (world.turns("TASK-A")[before["TASK-A"] :] + world.turns("")[before[""] :])[0]
        _, prompt, cached = summary
        assert 10 * cached > 9 * prompt, summary
        count = len(world.turns("TASK-A"))
        assert programs.claude_code(world, "--continue", "And TASK-A more?", **name) == DONE
        _, after, found = world.turns("TASK-A")[count]
        assert 2 * found > after, (after, found)
        shares = (100 * cached / prompt, prompt, 100 * found / after, after)
        return "the summary: %.1f %% of %d cached, the turn after it: %.1f %% of %d" % shares


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
        assert programs.claude_code(world, "TASK-PARENT: let two agents look.") == DONE
        first = [(p, c) for turn, p, c in world.turns("TASK-KID") if turn == 1]
        assert len(first) == 2, first
        # How much the second finds depends on how far the first has come when it arrives.
        prompt, cached = max(first, key=lambda one: one[1])
        assert 10 * cached > prompt, first
        later = [(p, c) for turn, p, c in world.turns("TASK-KID") if turn == 2]
        assert len(later) == 2 and all(10 * c > 9 * p for p, c in later), later
        share = 100 * cached / prompt
        return "the second child's first turn: %.1f %% of %d cached" % (share, prompt)


@test
def codex():
    run = lambda command: call("exec_command", cmd=command)
    script = three_turns("TASK-A", run, run("cat hello.txt"))
    with World(script) as world:
        assert DONE in programs.codex(world, "TASK-A: look around.")
        shares = world.share("TASK-A")
        assert DONE in programs.codex(world, "resume", "--last", "And TASK-A again?")
        return shares + " cached"


@test
def opencode():
    run = lambda command: call("bash", command=command, description="Look")
    script = three_turns("TASK-A", run, call("read", filePath="$FOLDER/hello.txt"))
    with World(script) as world:
        assert DONE in programs.opencode(world, "TASK-A: look around.")
        shares = world.share("TASK-A")
        assert DONE in programs.opencode(world, "--continue", "And TASK-A again?")
        return shares + " cached"


@test
def qwen_code():
    run = lambda command: call("run_shell_command", command=command, is_background=False)
    script = three_turns("TASK-A", run, call("read_file", file_path="$FOLDER/hello.txt"))
    with World(script) as world:
        said = programs.qwen_code(world, "TASK-A: look around.")
        assert DONE in said, said
        return world.share("TASK-A") + " cached"


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
    check = ["--auto-test", "--test-cmd", "grep day hello.txt"]
    with World(script) as world:
        programs.aider(world, "TASK-A: say good day.", *check)
        with open(os.path.join(world.folder, "hello.txt")) as file:
            assert file.read() == "good day\n"
        assert "Say good day" in world.run("git", "log", "--oneline"), "the commit message is ours"
        return world.share("TASK-A", turns=(1, 4, 7)) + " cached"


run_tests(TESTS + troubles(TOOLS, SERVER), sys.argv[3:])
