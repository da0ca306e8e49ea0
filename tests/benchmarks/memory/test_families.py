"""Families of requests: the same for a seed, split as they say, and answered by their own rules."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from string import Formatter

import pytest

from benchmarks.memory.families import FAMILIES, make_family, off_topic_requests
from benchmarks.memory.families.classification import TOPICS
from benchmarks.memory.families.family import Family, Request, make_task
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


@families
def test_a_family_has_the_sizes_that_were_asked_for(name: str) -> None:
    family = make_family(name, 0)
    assert [len(getattr(family, split)) for split in SPLITS] == [220, 120, 60]
    small = make_family(name, 0, traces=30, held_out=20)
    assert (len(small.traces), len(small.held_out)) == (30, 20)


@families
def test_a_family_is_the_same_for_the_same_seed_and_another_for_another(name: str) -> None:
    assert make_family(name, 3) == make_family(name, 3)
    first, other = make_family(name, 3), make_family(name, 4)
    for part in ("prefix", *SPLITS):
        assert getattr(first, part) != getattr(other, part)


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


@families
def test_how_many_traces_there_are_changes_nothing_else(name: str) -> None:
    few, many = make_family(name, 0, traces=20), make_family(name, 0, traces=300)
    assert (few.prefix, few.held_out, few.new_wording) == (
        many.prefix, many.held_out, many.new_wording
    )  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@families
def test_all_prompts_are_distinct_and_none_is_an_example(name: str, seed: int) -> None:
    family = make_family(name, seed)
    prompts = [each.prompt for each in (*requests_of(family), *examples_of(family))]
    assert len(examples_of(family)) >= 20
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("seed", SEEDS)
@families
def test_what_is_held_out_is_never_among_the_traces(name: str, seed: int) -> None:
    family = make_family(name, seed)
    traces = contents(family, "traces")
    assert not traces & contents(family, "held_out")
    assert not traces & contents(family, "new_wording")


@pytest.mark.parametrize("seed", SEEDS)
@families
def test_no_trace_has_a_new_wording_and_held_out_requests_have_none(name: str, seed: int) -> None:
    family = make_family(name, seed)
    assert templates(family.held_out) <= templates(family.traces)
    assert not templates(family.new_wording) & templates(family.traces)
    assert len(templates(family.new_wording)) >= 3


@families
def test_templates_of_a_kind_name_the_same_values(name: str) -> None:
    """A text therefore says all of its content, and two contents never have the same text."""
    task = make_task(name, 0)
    for kind in task.kinds:
        wordings = task.wordings(kind)
        named = [
            sorted(field for _, field, _, _ in Formatter().parse(template) if field)
            for template in (*wordings.seen, *wordings.new)
        ]
        assert all(one == other for one, other in combinations(named, 2)), kind


@families
def test_a_prefix_is_a_system_turn_and_whole_turns_after_it(name: str) -> None:
    family = make_family(name, 0)
    assert family.prefix.startswith("<|im_start|>system\n")
    assert family.prefix.endswith(f"{END}\n")
    # A tokenizer splits at the mark: what follows never changes the tokens of the prefix.
    assert all(request.prompt.startswith(USER) for request in requests_of(family))
    assert family.prefix.count("<|im_start|>") == family.prefix.count(END)


@families
def test_every_kind_has_its_share_of_each_split(name: str) -> None:
    task, family = make_task(name, 0), make_family(name, 0)
    for split in SPLITS:
        kinds = [
            kind for request in getattr(family, split) for kind in task.kinds
            if request.template in task.wordings(kind).seen + task.wordings(kind).new
        ]  # fmt: skip
        assert set(kinds) == set(task.kinds)


def test_complaints_go_to_the_team_of_the_topic_that_the_examples_show() -> None:
    family = make_family("classification", 0)
    examples = examples_of(family)
    assert len(examples) >= 64
    teams: dict[str, str] = {}
    for request in (*examples, *requests_of(family)):
        thing, team = answered(request).split(" -> ")
        topic = next(topic for topic, (things, _) in TOPICS.items() if thing in things)
        assert re.search(rf"\b{thing}\b", said(request))
        assert any(wrong in said(request) for wrong in TOPICS[topic][1])
        # The examples come first: nothing is said of teams anywhere else.
        assert teams.setdefault(topic, team) == team
    assert len(set(teams.values())) == len(TOPICS)
    shown = {answered(example).split(" -> ")[0] for example in examples}
    assert len(shown) >= 30


def test_things_and_what_is_wrong_with_them_belong_to_one_topic_only() -> None:
    for one, other in combinations(TOPICS.values(), 2):
        assert not set(one[0]) & set(other[0])
        assert not set(one[1]) & set(other[1])


def test_a_call_has_the_arguments_of_the_manual_with_values_from_the_request() -> None:
    family = make_family("tools", 0)
    manual = dict(re.findall(r"^(\w+\.\w+)\((.*?)\) ", family.prefix, flags=re.MULTILINE))
    assert len(manual) == 20
    examples = examples_of(family)
    assert {answered(example).split("(")[0] for example in examples} == set(manual)
    for request in (*examples, *requests_of(family)):
        called = re.fullmatch(r"(\w+\.\w+)\((.*)\)", answered(request))
        assert called
        arguments = [argument.split("=") for argument in called[2].split(", ")]
        assert ", ".join(name for name, _ in arguments) == manual[called[1]]
        for _, value in arguments:
            assert re.search(rf"(?<!\w){re.escape(value)}(?!\w)", said(request)), request


def test_a_wording_asks_for_one_tool_only() -> None:
    task = make_task("tools", 0)
    every = [
        t for kind in task.kinds for t in (*task.wordings(kind).seen, *task.wordings(kind).new)
    ]
    assert len(set(every)) == len(every)


def test_a_line_has_the_sign_of_its_kind_and_all_fields_of_the_note() -> None:
    family = make_family("formats", 0)
    signs: dict[str, str] = {}
    for request in (*examples_of(family), *requests_of(family)):
        line = re.fullmatch(r"(\w+) \* (\d+) @ (\w+) (\S+) (\w+)", answered(request))
        assert line, request.answer
        first, number, third, sign, last = line.groups()
        values = (first, number, third, last)
        kind = next(
            kind
            for kind, note in NOTES.items()
            if all(value in of for value, (_, of) in zip(values, note.fields, strict=True))
        )
        assert signs.setdefault(kind, sign) == sign
        for value in values:
            assert re.search(rf"\b{value}\b", said(request)), request
    assert len(set(signs.values())) == len(NOTES)
    for sign in signs.values():
        assert sign in family.prefix.split(END)[0]


def test_off_topic_requests_are_the_same_for_a_seed_and_all_distinct() -> None:
    found = off_topic_requests(0, 200)
    assert found == off_topic_requests(0, 200)
    assert found[:40] == off_topic_requests(0, 40)
    assert found[:40] != off_topic_requests(1, 40)
    assert len({request.prompt for request in found}) == 200
    for request in found:
        assert said(request)
        assert answered(request)
        assert "{" not in request.prompt + request.answer


def test_off_topic_requests_share_no_wording_with_a_family_and_change_topics() -> None:
    found = off_topic_requests(0, 60)
    for name in FAMILIES:
        family = make_family(name, 0)
        assert not templates(found) & templates(tuple(requests_of(family)))
    asked = [
        next(at for at, topic in enumerate(OFF_TOPICS) if request.template in topic.questions)
        for request in found
    ]
    assert set(asked) == set(range(len(OFF_TOPICS)))


def test_every_off_topic_request_can_be_had_and_no_more() -> None:
    most = sum(len(topic.rows) for topic in OFF_TOPICS)
    assert len({request.prompt for request in off_topic_requests(0, most)}) == most
    for count in (most + 1, -1):
        with pytest.raises(UsageError, match="count"):
            off_topic_requests(0, count)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(UsageError, match="name: expected one of classification, tools, formats"):
        make_family("poems", 0)
    with pytest.raises(UsageError, match="traces: expected at most the"):
        make_family("classification", 0, traces=2000)
