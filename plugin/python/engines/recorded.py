"""The recorded trace: how a host plays it, and what is counted."""

import pathlib

HERE = pathlib.Path(__file__).parent
PAGE = 16


def tokens_of(contents: list[int]) -> list[int]:
    page = [content * PAGE + at + 1 for content in contents for at in range(PAGE)]
    return page + [0]


class Player:
    """Tells victims by what the pages held that are handed out."""

    def __init__(self):
        self.contents: dict[int, int] = {}
        self.now = 0

    def handed_out(self, pages: list[int], contents: list[int]) -> list[int]:
        gone = [self.contents.pop(page) for page in pages if page in self.contents]
        self.contents.update(zip(pages, contents))
        return sorted(gone)


def play(player, trace: list[str]) -> list[str]:
    said = []
    for line in trace[1:]:
        verb, number, *contents = line.split()
        call = player.begin if verb == "begin" else player.end
        said.append(call(int(number), *([list(map(int, contents))] if verb == "begin" else [])))
    return said


def table(who: str, said: list[str]) -> str:
    begun = [line for line in said if line.startswith("begin") and "cached" in line]
    victims = sum(
        len([word for word in line.split("[")[1].strip("]").split(", ") if word]) for line in begun
    )
    cached = sum(int(line.split()[3]) for line in begun)
    short = sum("short" in line for line in said)
    ended = sum(line.startswith("end") and "missing" not in line for line in said)
    return f"| {who} | {len(begun)} | {cached} | {victims} | {short} | {ended} |"
