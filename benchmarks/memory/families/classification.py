"""Many-shot classification: complaints go to teams whose names say nothing of what they do.

    My parcel never arrived.     parcel -> green
    Help, the soup was cold.     soup -> gold

Which team takes which topic can be learnt from the examples of the prefix only, in which every
thing comes twice: the teams are dealt anew for each seed. What is held out is pairs of a thing and
what is wrong with it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.memory.families.family import Content, Task, Wordings, read_parts, words

EXAMPLES_PER_THING, EXAMPLES = 2, 66
TEAMS = words("blue green black white gold brown")

# Things of a topic, and what can be wrong with any of them.
TOPICS = {
    topic: (words(things), tuple(wrongs.split("; ")))
    for topic, things, wrongs in read_parts("classification.txt")
}
WORDINGS = Wordings(
    seen=(
        "My {thing} {wrong}.",
        "Help, the {thing} {wrong}.",
        "Our {thing} {wrong}, what now?",
        "Hello, this {thing} {wrong}.",
    ),
    new=(
        "I have to complain: the {thing} {wrong}.",
        "A customer says that her {thing} {wrong}.",
        "It seems that the {thing} {wrong}, please look into it.",
    ),
)


class Classification(Task):
    """A task that asks which team a complaint goes to."""

    kinds = tuple(TOPICS)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        names = random.Random(f"teams {seed}").sample(TEAMS, len(self.kinds))
        self.teams = dict(zip(self.kinds, names, strict=True))

    def draw(self, kind: str, rng: random.Random) -> Content:
        things, wrongs = TOPICS[kind]
        return content_of(kind, rng.choice(things), rng.choice(wrongs))

    def wordings(self, kind: str) -> Wordings:
        return WORDINGS

    def answer(self, content: Content) -> str:
        return f"{content['thing']} -> {self.teams[content.kind]}"

    def rules(self) -> str:
        return (
            "Every message goes to one team. Answer with the thing that the message is about, "
            "an arrow and the team of that thing."
        )

    def examples(self, rng: random.Random) -> Sequence[Content]:
        found = []
        for kind, (things, wrongs) in TOPICS.items():
            for thing in things:
                contents = [content_of(kind, thing, wrong) for wrong in wrongs]
                shown = [content for content in contents if not content.held_out(self.seed)]
                found += rng.sample(shown, min(EXAMPLES_PER_THING, len(shown)))
        return rng.sample(found, EXAMPLES)


def content_of(kind: str, thing: str, wrong: str) -> Content:
    return Content(kind, (("thing", thing), ("wrong", wrong)))
