"""A family of requests: one prefix that all of them begin with, and how they are split.

Everything is ChatML text that follows the prefix directly:

    prefix   <|im_start|>system … rules … <|im_end|>, then examples as turns of user and assistant
    prompt   <|im_start|>user … <|im_end|> <|im_start|>assistant
    answer   … <|im_end|>

A request is a content (what is asked) in a template (how it is worded). Two in three contents are
for traces, the others are held out, whatever the template; and some templates no trace uses:

                     contents of traces   other contents
    their templates  traces, examples     held_out
    other templates  -                    new_wording

A task says what contents there are and how they are worded; `make_family` does the splits. The
words of tasks are in text files beside their modules.
"""

from __future__ import annotations

import random
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from kvtier.errors import UsageError

# Tasks are classes of this package's modules, imported when one is asked for.
TASKS = {"classification": "Classification", "tools": "Tools", "formats": "Formats"}
FAMILIES = tuple(TASKS)
NEW_WORDINGS = 60
# Draws per request before a task is said to have no more distinct ones.
MOST_DRAWS = 50


def words(text: str) -> tuple[str, ...]:
    """The words of a list that is written as a text."""
    return tuple(text.split())


def read_parts(file: str) -> list[list[str]]:
    """The parts of a text file of this folder, which empty lines divide; of each its lines."""
    text = Path(__file__).with_name(file).read_text()
    return [[line.strip() for line in part.splitlines()] for part in text.strip().split("\n\n")]


def read_head(text: str) -> tuple[str, tuple[str, ...], str]:
    """Read the first line of a part: a name, words in brackets, and the rest."""
    found = re.fullmatch(r"(\w+)\((.*)\) (.*)", text)
    assert found, text
    return found[1], words(found[2]), found[3]


NAMES = words(
    "Anna Bruno Carla David Elena Felix Greta Hugo Irene Jonas Karin Leon Maria Nils Olga Paul "
    "Rosa Simon Tanja Viktor"
)
CITIES = words(
    "Oslo Rome Paris Berlin Madrid Lisbon Vienna Dublin Prague Athens Geneva Munich Boston Denver "
    "Chicago Toronto Sydney Cairo Lima Tokyo"
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


@dataclass(frozen=True)
class Request:
    """`prompt` ends where the assistant speaks, `answer` with its `<|im_end|>`; `template` is the
    wording, with the names of what is filled in."""

    prompt: str
    answer: str
    template: str


@dataclass(frozen=True)
class Family:
    """Requests behind `prefix`, all prompts distinct; see the module's picture for the splits."""

    name: str
    prefix: str
    traces: tuple[Request, ...]
    held_out: tuple[Request, ...]
    new_wording: tuple[Request, ...]


@dataclass(frozen=True)
class Wordings:
    """The templates of a kind of content: those that traces use, and those that none does."""

    seen: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class Content:
    """The subject of a request: its kind, and the words that a template and the answer take up."""

    kind: str
    values: tuple[tuple[str, str], ...]

    def held_out(self, seed: int) -> bool:
        """Return whether no trace has this content: one in three, by a checksum of content and
        seed."""
        return zlib.crc32(f"{seed} {self.kind} {self.values}".encode()) % 3 == 0

    def __getitem__(self, name: str) -> str:
        return dict(self.values)[name]


class Task(ABC):
    """The task that a family's module defines: its kinds of contents, their wordings and answers,
    and the text of the prefix. The same seed gives the same task."""

    kinds: tuple[str, ...]

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @abstractmethod
    def draw(self, kind: str, rng: random.Random) -> Content:
        """Draw some content of a kind, held out or not."""

    @abstractmethod
    def wordings(self, kind: str) -> Wordings:
        """The templates for contents of a kind."""

    @abstractmethod
    def answer(self, content: Content) -> str:
        """The one right answer, without `<|im_end|>`; the wording has no say in it."""

    @abstractmethod
    def rules(self) -> str:
        """Return what the system turn says."""

    @abstractmethod
    def examples(self, rng: random.Random) -> Sequence[Content]:
        """The contents of the examples that follow the system turn, none of them held out."""

    def prefix(self) -> str:
        """The system turn, and the examples in any order and in wordings that traces use too."""
        rng = random.Random(f"examples {self.seed}")
        contents = list(self.examples(rng))
        rng.shuffle(contents)
        shown = [self.request(each, rng.choice(self.wordings(each.kind).seen)) for each in contents]
        turns = [f"{example.prompt}{example.answer}\n" for example in shown]
        return "".join([f"<|im_start|>system\n{self.rules()}<|im_end|>\n", *turns])

    def request(self, content: Content, template: str) -> Request:
        """A content in a template: what the user says, and what the assistant answers."""
        return chat(template.format(**dict(content.values)), self.answer(content), template)

    def content(self, kind: str, rng: random.Random, held_out: bool = False) -> Content:
        """Draw some content of a kind, on one side of the split."""
        content = self.draw(kind, rng)
        while content.held_out(self.seed) != held_out:
            content = self.draw(kind, rng)
        return content


def make_family(name: str, seed: int, traces: int = 220, held_out: int = 120) -> Family:
    """The family of a name, the same for the same arguments. How many traces there are changes
    neither the prefix nor what is held out. Raises UsageError for an unknown name, and where the
    task's words do not give as many distinct requests."""
    task = make_task(name, seed)
    prefix = task.prefix()
    return Family(
        name,
        prefix,
        draw_requests("traces", traces, task, prefix),
        draw_requests("held_out", held_out, task, prefix, held_out=True),
        draw_requests("new_wording", NEW_WORDINGS, task, prefix, held_out=True, new=True),
    )


def make_task(name: str, seed: int) -> Task:
    if name not in TASKS:
        raise UsageError("name", f"one of {', '.join(FAMILIES)}", name)
    module = import_module(f"benchmarks.memory.families.{name}")
    task: Task = getattr(module, TASKS[name])(seed)
    return task


def draw_requests(
    split: str, count: int, task: Task, prefix: str, held_out: bool = False, new: bool = False
) -> tuple[Request, ...]:
    """`count` distinct requests, of kinds in turn, none of which is an example of the prefix."""
    rng = random.Random(f"{split} {task.seed}")
    found: dict[str, Request] = {}
    for _ in range(MOST_DRAWS * count):
        if len(found) == count:
            break
        kind = task.kinds[len(found) % len(task.kinds)]
        wordings = task.wordings(kind)
        template = rng.choice(wordings.new if new else wordings.seen)
        request = task.request(task.content(kind, rng, held_out), template)
        if request.prompt not in prefix:
            found.setdefault(request.prompt, request)
    if len(found) != count:
        raise UsageError(split, f"at most the {len(found)} that are distinct", count)
    requests = list(found.values())
    rng.shuffle(requests)
    return tuple(requests)


def chat(text: str, answer: str, template: str) -> Request:
    """A request in ChatML: what the user says, and what the assistant answers."""
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return Request(prompt, f"{answer}<|im_end|>", template)
