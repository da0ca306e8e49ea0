"""A manual of tools with made-up names; the answer to a request is a call, its arguments copied.

    Set a timer of 25 minutes for the rice.     timer.murlo(minutes=25, dish=rice)

What each tool is for is said in the system turn, and an example or two of its calls follow. Which
subject has which made-up name is dealt anew for each seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.memory.families.family import (
    CITIES,
    DAYS,
    NAMES,
    Content,
    Task,
    Wordings,
    read_head,
    read_parts,
    words,
)

TOOL_NAMES = words(
    "murlo tavik brenzo saldu ferix gomba lurka nadvo pelmi quista rotun sivra tolpa umbri vexla "
    "wandu yorka zenpo hulmi dorva"
)
NUMBERS = tuple(str(number) for number in range(12, 60))
HOURS = tuple(f"{hour}:{minute}" for hour in range(6, 22) for minute in ("15", "30", "45"))
# So many tools have a second example.
TWICE = 10
# The values that an argument can have.
VALUES = {
    "name": NAMES,
    "city": CITIES,
    "from": CITIES[:10],
    "to": CITIES[10:],
    "day": DAYS,
    "hour": HOURS,
    "minutes": NUMBERS,
    "amount": NUMBERS,
    "count": NUMBERS,
    "percent": NUMBERS,
    "degrees": NUMBERS[:14],
    "number": tuple(str(number) for number in range(1101, 9900, 107)),
    "room": words("kitchen bedroom office garage bathroom hall cellar attic"),
    "dish": words("rice pasta soup bread cake eggs tea pizza beans fish"),
    "item": words("apples candles pens batteries eggs plates bulbs stamps"),
    "plant": words("roses tomatoes ferns herbs tulips lemons orchids grapes"),
    "music": words("jazz opera blues folk rock tango disco soul"),
    "topic": words("taxes insurance holiday school garden budget contract rent"),
    "word": words("bridge winter butter window forest doctor silver summer"),
    "language": words("French German Spanish Italian Polish Greek Dutch Danish"),
    "film": words("Casablanca Titanic Rocky Jaws Alien Psycho Gandhi Amadeus"),
}


@dataclass(frozen=True)
class Tool:
    """One tool: what the manual says of it, its arguments in order, and how it is asked for."""

    subject: str
    purpose: str
    arguments: tuple[str, ...]
    wordings: Wordings


def read_tool(head: str, *wordings: str) -> Tool:
    """Read a tool's part of the manual: what it is and is for, and how it is asked for. The last
    wording is for no trace."""
    subject, arguments, purpose = read_head(head)
    return Tool(subject, purpose, arguments, Wordings(wordings[:-1], wordings[-1:]))


TOOLS = tuple(read_tool(*part) for part in read_parts("tools.txt"))


class Tools(Task):
    """A task that asks which tool to call, and with what."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        names = random.Random(f"tools {seed}").sample(TOOL_NAMES, len(TOOLS))
        self.tools = {
            f"{tool.subject}.{name}": tool for tool, name in zip(TOOLS, names, strict=True)
        }
        self.kinds = tuple(self.tools)

    def draw(self, kind: str, rng: random.Random) -> Content:
        arguments = self.tools[kind].arguments
        return Content(kind, tuple((name, rng.choice(VALUES[name])) for name in arguments))

    def wordings(self, kind: str) -> Wordings:
        return self.tools[kind].wordings

    def answer(self, content: Content) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in content.values)
        return f"{content.kind}({arguments})"

    def rules(self) -> str:
        lines = [
            f"{name}({', '.join(tool.arguments)}) {tool.purpose}."
            for name, tool in self.tools.items()
        ]
        return "\n".join(["Answer every request with a call of one of these tools.", *lines])

    def examples(self, rng: random.Random) -> Sequence[Content]:
        twice = rng.sample(self.kinds, TWICE)
        return [self.content(kind, rng) for kind in (*self.kinds, *twice)]
