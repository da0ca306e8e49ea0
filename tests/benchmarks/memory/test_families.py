"""Families of requests: the same for a seed, split as they say, and answered by their own rules."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from string import Formatter

import pytest

from benchmarks.memory.families import FAMILIES, make_family, off_topic_requests
from benchmarks.memory.families.classification import TOPICS
from benchmarks.memory.families.family import Family, Request
from benchmarks.memory.families.formats import NOTES
from benchmarks.memory.families.off_topic import TOPICS as OFF_TOPICS
from kvtier.errors import UsageError

ROOT = Path(__file__).parents[3]
SPLITS = ("traces", "held_out", "new_wording")
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
SEEDS = (0, 3)

families = pytest.mark.parametrize("name", FAMILIES)


def said(request: Request) -> str:
    """Return what the user says, without the marks around it."""
    marks = re.fullmatch(rf"{re.escape(USER)}(.*){re.escape(END)}\n{re.escape(ASSISTANT)}",
                         request.prompt)  # fmt: skip
    assert marks, request.prompt
    return marks[1]


def answered(request: Request) -> str:
    assert request.answer.endswith(END)
    return request.answer.removesuffix(END)


def requests_of(family: Family) -> list[Request]:
    return [request for split in SPLITS for request in getattr(family, split)]


def examples_of(family: Family) -> list[Request]:
    """The turns of user and assistant in the prefix."""
    turns = re.findall(rf"({re.escape(USER)}.*?{re.escape(ASSISTANT)})(.*?{re.escape(END)})",
                       family.prefix, flags=re.DOTALL)  # fmt: skip
    return [Request(prompt, answer, "") for prompt, answer in turns]


def templates(requests: tuple[Request, ...]) -> set[str]:
    return {request.template for request in requests}


def contents(family: Family, split: str) -> set[tuple[str, ...]]:
    """Return what the requests of a split are about, whatever their wording."""
    found = set()
    for request in getattr(family, split):
        values = dict(filled(request))
        found.add((answered(request), *(values[name] for name in sorted(values))))
    return found


def filled(request: Request) -> list[tuple[str, str]]:
    """Return what stands in a request for each name in its template."""
    parts = list(Formatter().parse(request.template))
    names = [name for _, name, _, _ in parts if name]
    pattern = "".join(re.escape(text) + ("(.+?)" if name else "") for text, name, _, _ in parts)
    found = re.fullmatch(pattern, said(request))
    assert found, request
    return list(zip(names, found.groups(), strict=True))


def test_families_do_not_depend_on_the_process() -> None:
    script = (
        "import zlib; from benchmarks.memory.families import *\n"
        "made = [make_family(name, 5) for name in FAMILIES], off_topic_requests(5, 50)\n"
        "print(zlib.crc32(repr(made).encode()))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": ".", "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1


@pytest.mark.parametrize("seed", SEEDS)
@families
def test_a_family_is_split_as_it_says_and_all_its_prompts_are_distinct(
    name: str, seed: int
) -> None:
    family, examples = make_family(name, seed), examples_of(make_family(name, seed))
    prompts = [each.prompt for each in (*requests_of(family), *examples)]
    assert len(examples) >= 20
    assert len(set(prompts)) == len(prompts)
    # A tokenizer splits at the mark: what follows never changes the tokens of the prefix.
    assert family.prefix.endswith(f"{END}\n")
    assert all(prompt.startswith(USER) for prompt in prompts)
    traces = contents(family, "traces")
    assert not traces & contents(family, "held_out")
    assert not traces & contents(family, "new_wording")
    assert templates(family.held_out) <= templates(family.traces)
    assert not templates(family.new_wording) & templates(family.traces)
    assert len(templates(family.new_wording)) >= 3


@families
def test_the_number_of_traces_changes_nothing_else_and_another_seed_everything(name: str) -> None:
    few, many, other = (
        make_family(name, seed, traces=count) for seed, count in ((0, 20), (0, 300), (1, 20))
    )
    assert (len(few.traces), len(many.traces)) == (20, 300)
    for part in ("prefix", "held_out", "new_wording"):
        assert getattr(few, part) == getattr(many, part) != getattr(other, part)


@families
def test_an_answer_follows_from_the_request_and_the_prefix(name: str) -> None:
    """The subject stands in the request; what else is answered, the examples show."""
    family = make_family(name, 0)
    shown = set(re.findall(r"\w+", " ".join(map(answered, examples_of(family)))))
    learnt: dict[str, str] = {}
    for request in (*examples_of(family), *requests_of(family)):
        answer = answered(request)
        assert set(re.findall(r"\w+", answer)) <= shown | set(re.findall(r"\w+", said(request)))
        if name == "classification":
            thing, team = answer.split(" -> ")
            assert re.search(rf"\b{thing}\b", said(request))
            assert learnt.setdefault(thing, team) == team
    if name == "classification":
        assert len(set(learnt.values())) == len(TOPICS)


def test_a_call_has_the_arguments_of_the_manual_with_values_from_the_request() -> None:
    family = make_family("tools", 0)
    manual = dict(re.findall(r"^(\w+\.\w+)\((.*?)\) ", family.prefix, flags=re.MULTILINE))
    assert len(manual) == 20
    for request in (*examples_of(family), *requests_of(family)):
        called = re.fullmatch(r"(\w+\.\w+)\((.*)\)", answered(request))
        assert called
        arguments = [argument.split("=") for argument in called[2].split(", ")]
        assert ", ".join(name for name, _ in arguments) == manual[called[1]]
        for _, value in arguments:
            assert re.search(rf"(?<!\w){re.escape(value)}(?!\w)", said(request)), request


def test_a_line_has_the_sign_of_its_kind() -> None:
    family = make_family("formats", 0)
    signs: dict[tuple[str, ...], str] = {}
    for request in (*examples_of(family), *requests_of(family)):
        line = re.fullmatch(r"\w+ \* \d+ @ \w+ (\S+) \w+", answered(request))
        assert line, request.answer
        names = tuple(sorted(dict(filled(request)))) if request.template else ()
        if names:
            assert signs.setdefault(names, line[1]) == line[1]
    assert len(set(signs.values())) == len(signs) == len(NOTES)


def test_off_topic_requests_are_the_seeds_and_share_no_wording_with_a_family() -> None:
    most = sum(len(topic.rows) for topic in OFF_TOPICS)
    found = off_topic_requests(0, most)
    assert found[:40] == off_topic_requests(0, 40) != off_topic_requests(1, 40)
    assert len({request.prompt for request in found}) == most
    for request in found:
        assert said(request)
        assert answered(request)
        assert "{" not in request.prompt + request.answer
    for name in FAMILIES:
        assert not templates(found) & templates(tuple(requests_of(make_family(name, 0))))
    # Topics take turns.
    asked = {request.template for request in found[:60]}
    assert all(asked & set(topic.questions) for topic in OFF_TOPICS)
    for count in (most + 1, -1):
        with pytest.raises(UsageError, match="count"):
            off_topic_requests(0, count)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(UsageError, match="name: expected one of classification, tools, formats"):
        make_family("poems", 0)
    with pytest.raises(UsageError, match="traces: expected at most the"):
        make_family("classification", 0, traces=2000)
