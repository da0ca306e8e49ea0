"""Format rules: a note in prose becomes one line of a fixed and unusual format.

    Please send 12 lamps to Oslo by Friday.                   lamps * 12 @ Oslo >> Friday
    Anna brought back 30 mugs because they are small.         mugs * 30 @ Anna << small
    There are 40 blue chairs left in the cellar.              chairs * 40 @ cellar == blue
    Because of fog the bus from the zoo comes 25 minutes late. bus * 25 @ zoo !! fog

The four kinds of notes have a sign each, and which sign that is is dealt anew for each seed.
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

SIGNS = (">>", "<<", "==", "!!", "##", "%%")
# The last wordings of each kind are for no trace.
NEW = 2
# The values that a field can have.
VALUES = {
    "goods": words(
        "lamps chairs tables screws doors pipes mugs plates tiles boxes hammers brushes "
        "ladders buckets windows shirts shoes pens rings bags"
    ),
    "number": tuple(str(number) for number in range(11, 60)),
    "city": CITIES[:9],
    "day": DAYS,
    "name": NAMES[:9],
    "wrong": words("old small big dirty heavy ugly dark thin"),
    "room": words("cellar attic garage office hall yard shed kitchen barn"),
    "colour": words("red blue green white black brown grey yellow"),
    "vehicle": words("bus truck train van boat car plane ferry"),
    "place": words("airport harbour market museum school castle beach zoo park"),
    "reason": words("snow fog traffic ice rain wind fire smoke"),
}


@dataclass(frozen=True)
class Note:
    """A kind of note: its four fields, in the order of the line, and how it is said."""

    about: str
    fields: tuple[str, ...]
    wordings: Wordings


def read_note(head: str, *wordings: str) -> tuple[str, Note]:
    """Read a kind of note: its name, and what it is."""
    kind, fields, about = read_head(head)
    return kind, Note(about, fields, Wordings(wordings[:-NEW], wordings[-NEW:]))


NOTES = dict(read_note(*part) for part in read_parts("formats.txt"))


class Formats(Task):
    """The line that a note becomes."""

    kinds = tuple(NOTES)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        signs = random.Random(f"signs {seed}").sample(SIGNS, len(NOTES))
        self.signs = dict(zip(NOTES, signs, strict=True))

    def draw(self, kind: str, rng: random.Random) -> Content:
        return Content(kind, tuple((name, rng.choice(VALUES[name])) for name in NOTES[kind].fields))

    def wordings(self, kind: str) -> Wordings:
        return NOTES[kind].wordings

    def answer(self, content: Content) -> str:
        first, number, place, last = (value for _, value in content.values)
        return f"{first} * {number} @ {place} {self.signs[content.kind]} {last}"

    def rules(self) -> str:
        kinds = [
            f"{note.about} {{{note.fields[0]}}} * {{{note.fields[1]}}} @ {{{note.fields[2]}}} "
            f"{self.signs[kind]} {{{note.fields[3]}}}"
            for kind, note in NOTES.items()
        ]
        head = "Write every note as one line. A star comes before the number, an @ before the third"
        return "\n".join([f"{head} word, and a sign says what kind of note it is.", *kinds])

    def examples(self, rng: random.Random) -> Sequence[Content]:
        """One for every word that can stand before a sign."""
        found = []
        for kind, note in NOTES.items():
            third = note.fields[2]
            for word in VALUES[third]:
                content = self.content(kind, rng)
                while content[third] != word:
                    content = self.content(kind, rng)
                found.append(content)
        return found
