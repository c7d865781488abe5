"""Runs what README and docs tell their readers to run, and checks what they show.

check.py ROOTSTOCK. Shell blocks run as they stand, in one shell a block, against a server on port
8000 that was started as the README says; JSON and TOML must parse, Python must run where its
packages are, links must lead somewhere, SUMMARY.md must name every page. What cannot be run here
is told with its reason, never left out silently. Exit 77: the default model is not here.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = sys.argv[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What a command begins with, and why it is not run here.
TOLD = {
    "cargo": "building and testing are stages of their own",
    "rootstock": "this binary was built without it",
    "claude": "agent programs are a stage of their own",
    "vllm": "engines are a stage of their own",
    "pip": "the wheel is a stage of its own",
    "docker": "there is no container engine here",
    "systemctl": "there is no service manager here",
    "sudo": "it changes the machine",
    "mdbook": "the book is read as it stands, see SUMMARY.md below",
}
# Parts of curl's arguments that name something a reader has and this test has not.
ELSEWHERE = {
    "INDEXER": "an indexer of the reader's",
    "/v1/kv/storage": "tests of the storage tier ask it",
}

PRELUDE = r"""
set -eu
note() { printf '%s\t%s\n' "$1" "$2" >> "$NOTES"; }
curl() {
    local at
    for at in $ELSEWHERE; do
        case "$*" in *"$at"*) note told "curl $*"; return 0;; esac
    done
    command curl --silent --show-error --fail-with-body --max-time 120 "$@" > "$OUT" ||
        { cat "$OUT"; return 1; }
    note ran "curl $*"
}
rootstock() {
    case "${1:-}" in
        "" | -* | serve)
            # It would need the port of the one that runs: its flags are read and shown.
            case "$*" in *--print-config*) ;; *) set -- "$@" --print-config;; esac
            command "$BINARY" "$@" > "$OUT" || return 1;;
        top) # An optional part of the binary.
            command "$BINARY" "$@" > "$OUT" 2>&1 || { note told "rootstock $*"; return 0; };;
        *) command "$BINARY" "$@" > "$OUT" < /dev/null || return 1;;
    esac
    note ran "rootstock $*"
}
"""


def blocks(page):
    """(language, text, line) of each fenced block."""
    language, lines, at = None, [], 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```") and language is None:
            language, lines, at = line[3:].split(",")[0].strip(), [], number + 1
        elif line.startswith("```"):
            yield language, "\n".join(lines) + "\n", at
            language = None
        elif language is not None:
            lines.append(line)
    assert language is None, f"{page}: a block is not closed"


class Run:
    def __init__(self, work):
        self.work, self.ran, self.told, self.failed = work, 0, [], []

    def shell(self, text, where):
        notes, out = self.work / "notes", self.work / "out"
        notes.write_text("")
        stubs = [name for name in TOLD if name != "rootstock"]
        functions = "".join(f'{name}() {{ note told "{name} $*"; }}\n' for name in stubs)
        env = {
            **os.environ,
            "NOTES": str(notes),
            "OUT": str(out),
            "BINARY": BINARY,
            "ELSEWHERE": " ".join(ELSEWHERE),
            "HOME": str(self.work),
        }
        done = subprocess.run(
            ["bash", "-c", PRELUDE + functions + text],
            cwd=self.work,
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
        )
        lines = [line.split("\t", 1) for line in notes.read_text().splitlines() if "\t" in line]
        self.ran += sum(kind == "ran" for kind, _ in lines)
        self.told += [(where, command.split("\n")[0]) for kind, command in lines if kind == "told"]
        if done.returncode != 0:
            self.fail(where, f"exit {done.returncode}: {done.stdout[-600:]}{done.stderr[-600:]}")
        elif not lines:
            self.fail(
                where, "nothing of the block was seen to run; does check.py know its commands?"
            )

    def python(self, text, where):
        if subprocess.run([sys.executable, "-c", "import openai"], capture_output=True).returncode:
            self.told.append((where, "python (the openai package is not here)"))
            return
        done = subprocess.run(
            [sys.executable, "-c", text], cwd=self.work, capture_output=True, text=True, timeout=600
        )
        self.ran += 1
        if done.returncode:
            self.fail(where, done.stderr[-800:])

    def parsed(self, read, text, where):
        try:
            read(text)
            self.ran += 1
        except ValueError as error:
            self.fail(where, str(error))

    def keys(self, text, where):
        """A TOML block is a key file or a configuration: the server must take it."""
        self.parsed(tomllib.loads, text, where)
        file = self.work / "block.toml"
        file.write_text(text)
        flag = "--api-keys" if "[[key]]" in text else "--config"
        done = subprocess.run(
            [BINARY, flag, str(file), "--print-config"], capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            self.fail(where, done.stderr)

    def fail(self, where, why):
        self.failed.append(where)
        print(f"FAILED {where}: {why}", flush=True)

    def page(self, page):
        for language, text, line in blocks(page):
            where = f"{page.relative_to(ROOT)}:{line}"
            match language:
                case "sh":
                    self.shell(text, where)
                case "python":
                    self.python(text, where)
                case "json":
                    self.parsed(json.loads, text, where)
                case "toml":
                    self.keys(text, where)
                case "rust" | "text" | "promql" | "yaml" | "ini" | "dockerfile" | "":
                    pass
                case _:
                    self.fail(where, f"blocks of {language!r} are not known here")

    def links(self, page):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists():
                self.fail(str(page.relative_to(ROOT)), f"the link {target} leads nowhere")
        self.ran += 1


def answers(path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:8000{path}", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def summary(run):
    text = (ROOT / "docs" / "SUMMARY.md").read_text()
    listed = set(re.findall(r"\]\(([^)]+)\)", text))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"SUMMARY.md"}
    for name in sorted(pages - listed):
        run.fail("docs/SUMMARY.md", f"{name} is not in it")
    tomllib.loads((ROOT / "docs" / "book.toml").read_text())
    run.ran += 1


def main():
    begin = time.monotonic()
    work = pathlib.Path(tempfile.mkdtemp())
    log = (work / "log").open("w")
    # As the README's first command does it, with the binary that was built.
    server = subprocess.Popen([BINARY], stderr=log, cwd=work)
    try:
        while not answers("/ready"):
            if server.poll() is not None:
                said = (work / "log").read_text()
                print(said)
                missing = "PyPI" in said or "pip" in said or "network" in said
                return 77 if missing else 1
            time.sleep(0.2)
        run = Run(work)
        for page in PAGES:
            run.page(page)
            run.links(page)
            if page.name == "README.md":
                print(
                    f"README from the start to its last command: {time.monotonic() - begin:.0f} s"
                )
        summary(run)
        if not answers("/health"):
            run.fail("the server", "it did not live to the end")
        for where, command in run.told:
            word = command.split()[0]
            reason = TOLD.get(word) or next(
                (why for at, why in ELSEWHERE.items() if at in command), "not here"
            )
            print(f"told, not run: {where}: {command[:70]} ({reason})")
        print(
            f"test result: {'FAILED' if run.failed else 'ok'}. "
            f"{run.ran} passed; {len(run.failed)} failed;"
        )
        return 1 if run.failed else 0
    finally:
        server.terminate()
        server.wait(60)
        shutil.rmtree(work, ignore_errors=True)


sys.exit(main())
