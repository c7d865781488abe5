"""What each agent program does when it goes badly: a first token that is long in coming, a full
server, a prompt that does not fit, an answer that breaks off.

The server and its signs of life are the real ones; the scripted model waits and fails on command.
In a stall of `ROOTSTOCK_STALL_S` seconds (330 is beyond the patience of every program) signs come as
often as they always do. Without it a stall takes 3.3 s and signs come a hundred times as often: as
many of them, in an hundredth of the time.
"""

import json
import os
import socket
import threading
import time

from programs import PROGRAMS, World

DONE = "All is done."
STALL_S = float(os.environ.get("ROOTSTOCK_STALL_S", 0))


def wait_for(what, limit_s=600):
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if what():
            return
        time.sleep(0.02)
    raise AssertionError("it never came")


def script(program, **more):
    part = {"marker": "TASK-A", "turns": [DONE], **more}
    if program is not PROGRAMS["aider"]:
        part["tools"] = True
    return [part, {"marker": "", "turns": ["Looking around"]}]


def stall(tools, server, program):
    seconds = STALL_S or 3.3
    options = {} if STALL_S else {"signs_ms": [10, 100, 500]}
    part = script(program, until="$FOLDER/../go")
    with World(tools, server, part, options, watched=True) as world:

        def go():
            wait_for(lambda: world.turns("TASK-A"))
            time.sleep(seconds)
            world.write("go", "")

        threading.Thread(target=go, daemon=True).start()
        said = program(world, "TASK-A: look around.", limit_s=seconds + 600)
        # Qwen Code asks once more when it is done, to remember what it learned.
        asked = sum(turn == 1 for turn, _, _ in world.turns("TASK-A"))
        if program is not PROGRAMS["aider"]:
            assert DONE in said, said
        assert asked == 1, "asked %d times: it did not wait" % asked
        return "waited %.0f s for one answer" % seconds


def post(body):
    """A request whose answer nobody looks at; the connection stays open."""
    text = json.dumps(body)
    connection = socket.create_connection(("127.0.0.1", 8787))
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"
    connection.sendall((head % (len(text), text)).encode())
    return connection


def full(tools, server, program):
    """One seat and one place in the queue, both taken: 429 with a time to wait."""
    block = {"marker": "TASK-BLOCK", "turns": ["ok"], "until": "$FOLDER/../go"}
    parts = script(program) + [block]
    options = {"max_running": 1, "max_queue": 1}
    with World(tools, server, parts, options, watched=True) as world:
        body = {"messages": [{"role": "user", "content": "TASK-BLOCK"}], "max_tokens": 9}
        held = [post(body)]
        wait_for(lambda: world.turns("TASK-BLOCK"))
        held.append(post(body))
        refused = lambda: world.relay.answers(429)

        def go():
            wait_for(refused)
            world.write("go", "")

        threading.Thread(target=go, daemon=True).start()
        said = program(world, "TASK-A: look around.", well=False, limit_s=900)
        for connection in held:
            connection.close()
        first = refused()[0]
        later = [at for at, _ in world.relay.asked() if at > first]
        assert later, "it never asked again: %s" % said
        told = "done" if world.turns("TASK-A") else "not done"
        if program is not PROGRAMS["aider"]:
            told += ", says so" if DONE in said else ", says: %s" % said
        return "%d x 429, asks again after %.1f s, %s" % (len(refused()), later[0] - first, told)


def too_long(tools, server, program):
    """A window of 2,048 tokens, which are bytes here, is too small for every one of them."""
    with World(tools, server, script(program), {"context": 2048}, watched=True) as world:
        said = program(world, "TASK-A: look around.", well=False, limit_s=900)
        refused = len(world.relay.answers(400))
        assert 1 <= refused <= 12, "refused %d times" % refused
        assert not world.turns("TASK-A")
        line = [line for line in said.splitlines() if "too long" in line or "ontext" in line]
        told = line[0].strip()[:160] if line else "nothing of it is shown"
        return "%d requests, then the end: %s" % (len(world.relay.asked()), told)


def broken(tools, server, program):
    """An answer breaks off behind its fifth token, once; the next one is whole."""
    with World(tools, server, script(program, breaks=5), watched=True) as world:
        said = program(world, "TASK-A: look around.", well=False, limit_s=900)
        turns = world.turns("TASK-A")
        assert turns, said
        cached = ""
        if len(turns) > 1:
            _, prompt, found = turns[1]
            assert 10 * found > 9 * prompt, turns
            cached = ", from the cache"
        end = "done" if DONE in said or program is PROGRAMS["aider"] else "fails"
        return "asks %d times%s, %s" % (len(turns), cached, end)


KINDS = {"stall": stall, "full_queue": full, "too_long": too_long, "broken_stream": broken}


def troubles(tools, server):
    def one(kind, program):
        return lambda: kind(tools, server, program)

    return [
        ("%s_%s" % (name, kind_name), one(kind, program))
        for kind_name, kind in KINDS.items()
        for name, program in PROGRAMS.items()
    ]
