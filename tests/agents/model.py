"""Each agent program once on the default model: a session that nobody scripted.

The model is far too small for these prompts, so nothing is asked of what it says; as it would not
stop by itself, the server ends its answers. What counts: the session ends by itself, and the
program waits for as long as its first prompt takes, which is minutes without an accelerator.

Usage: model.py SERVER TOOLS_FOLDER [NAME..].
"""

import os
import sys
import time

from programs import PROGRAMS, World, run_tests

SERVER, TOOLS = os.path.realpath(sys.argv[1]), os.path.realpath(sys.argv[2])
LIMIT_S = 3600


def session(program):
    with World(TOOLS, SERVER, watched=True) as world:
        begun = time.monotonic()
        said = program(world, "Say hello.", limit_s=LIMIT_S, well=False)
        took = time.monotonic() - begun
        asked, failed = world.relay.asked(), 0
        for status in (400, 404, 408, 413, 429, 500, 503):
            failed += len(world.relay.answers(status))
        prompt = world.metric("rootstock_prompt_tokens_total")
        reused = world.metric("rootstock_reused_tokens_total")
        answers = world.metric("rootstock_answers_total")
        print(said[-1200:])
        for at, path in asked:
            print("  %6.1f s %s" % (at - begun, path))
        return (
            "%d requests, %d refused, %d answers, %d prompt tokens of which %d cached, %.0f s"
            % (len(asked), failed, answers, prompt, reused, took)
        )


run_tests([(name, lambda p=p: session(p)) for name, p in PROGRAMS.items()], sys.argv[3:])
