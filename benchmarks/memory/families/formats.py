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

from benchmarks.memory.families.family import CITIES, DAYS, NAMES, Content, Task, Wordings, words

SIGNS = (">>", "<<", "==", "!!", "##", "%%")
NUMBERS = tuple(str(number) for number in range(11, 60))
GOODS = words(
    "lamps chairs tables screws doors pipes mugs plates tiles boxes hammers brushes "
    "ladders buckets windows shirts shoes pens rings bags"
)
ROOMS = words("cellar attic garage office hall yard shed kitchen barn")
PLACES = words("airport harbour market museum school castle beach zoo park")


@dataclass(frozen=True)
class Note:
    """A kind of note: what its four fields can be, in the order of the line, and how it is said."""

    about: str
    fields: tuple[tuple[str, tuple[str, ...]], ...]
    wordings: Wordings


NOTES = {
    "order": Note(
        "An order: the goods, how many, the city, the day.",
        (("goods", GOODS), ("number", NUMBERS), ("city", CITIES[:9]), ("day", DAYS)),
        Wordings.of(
            """
            Please send {number} {goods} to {city} by {day}.
            We order {number} {goods}, to be in {city} on {day}.
            The shop in {city} orders {number} {goods} for {day}.
            By {day} our people in {city} will be in need of {number} more {goods}.
            Could you get us {number} {goods}? They should reach {city} before {day}.
            """,
            new=2,
        ),
    ),
    "return": Note(
        "A return: the goods, how many, who brings them back, what is wrong.",
        (
            ("goods", GOODS),
            ("number", NUMBERS),
            ("name", NAMES[:9]),
            ("wrong", words("old small big dirty heavy ugly dark thin")),
        ),
        Wordings.of(
            """
            {name} brought back {number} {goods} because they are {wrong}.
            A return of {number} {goods} from {name}, who calls them {wrong}.
            {number} {goods} came back, {name} says they are {wrong}.
            {name} does not want to keep the {number} {goods}, so {wrong} are they.
            Too {wrong}! That is why {name} no longer wants the {number} {goods}.
            """,
            new=2,
        ),
    ),
    "stock": Note(
        "A stock count: the goods, how many, the room, the colour.",
        (
            ("goods", GOODS),
            ("number", NUMBERS),
            ("room", ROOMS),
            ("colour", words("red blue green white black brown grey yellow")),
        ),
        Wordings.of(
            """
            There are {number} {colour} {goods} left in the {room}.
            I counted {number} {goods} in the {room}, all {colour}.
            In the {room} we still have {number} {goods}, {colour} ones.
            Whoever looks into the {room} finds {number} {goods} there, {colour} ones.
            The {colour} {goods} are all in the {room}, {number} of them by now.
            """,
            new=2,
        ),
    ),
    "delay": Note(
        "A delay: the vehicle, how many minutes, from where, the reason.",
        (
            ("vehicle", words("bus truck train van boat car plane ferry")),
            ("number", NUMBERS),
            ("place", PLACES),
            ("reason", words("snow fog traffic ice rain wind fire smoke")),
        ),
        Wordings.of(
            """
            The {vehicle} from the {place} is {number} minutes late because of {reason}.
            Because of {reason} the {vehicle} from the {place} comes {number} minutes late.
            Late by {number} minutes: the {vehicle} from the {place}, reason {reason}.
            There is {reason} at the {place}, the {vehicle} needs {number} minutes more.
            It was {reason} that held up the {vehicle} at the {place}, by {number} minutes.
            """,
            new=2,
        ),
    ),
}


class Formats(Task):
    """The line that a note becomes."""

    kinds = tuple(NOTES)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        signs = random.Random(f"signs {seed}").sample(SIGNS, len(NOTES))
        self.signs = dict(zip(NOTES, signs, strict=True))

    def draw(self, kind: str, rng: random.Random) -> Content:
        return Content(kind, tuple((name, rng.choice(of)) for name, of in NOTES[kind].fields))

    def wordings(self, kind: str) -> Wordings:
        return NOTES[kind].wordings

    def answer(self, content: Content) -> str:
        first, number, place, last = (value for _, value in content.values)
        return f"{first} * {number} @ {place} {self.signs[content.kind]} {last}"

    def rules(self) -> str:
        kinds = [
            f"{note.about} {{{note.fields[0][0]}}} * {{{note.fields[1][0]}}} @ "
            f"{{{note.fields[2][0]}}} {self.signs[kind]} {{{note.fields[3][0]}}}"
            for kind, note in NOTES.items()
        ]
        head = "Write every note as one line. A star comes before the number, an @ before the third"
        return "\n".join([f"{head} word, and a sign says what kind of note it is.", *kinds])

    def examples(self, rng: random.Random) -> Sequence[Content]:
        """One for every word that can stand before a sign."""
        found = []
        for kind, note in NOTES.items():
            field, words = note.fields[2]
            for word in words:
                content = self.content(kind, rng)
                while content[field] != word:
                    content = self.content(kind, rng)
                found.append(content)
        return found
