"""The soak's comparison with the reference: what is right, what is noticed, what is no answer."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("aiohttp")

from soak_answers import EOT, said

from benchmarks.soak.check import OFF, TIE, Reference, compare, teacher_forced
from benchmarks.soak.client import Asked, RequestFailedError, read_answer
from benchmarks.soak.models import FIRST, SECOND
from kvtier.synthetic.recall import ANSWER_TOKENS

REFERENCE = {"logprobs": (-0.1, -0.2, -0.3), "choices": (7, 8, EOT), "best": (-0.1, -0.2, -0.3)}
OTHER = {"tokens": (7, 9, EOT)}


@pytest.mark.parametrize(
    ("changes", "reference", "wrong", "ties", "right"),
    [
        ({}, {}, None, 0, True),
        (OTHER, {"best": (-0.1, -0.2 + 2 * TIE, -0.3)}, 1, 0, False),
        # The reference likes the token as much.
        (OTHER, {"best": (-0.1, -0.2 + TIE / 2, -0.3)}, None, 1, True),
        *(
            ({"logprobs": (-0.1, other, -0.3)}, {}, None, 0, False)
            for other in (-0.2 - 2 * OFF, -0.2 + 2 * OFF, math.nan, -math.inf)
        ),
        ({"prompt_logprobs": (-1.0, -2.0)}, {"prompt_logprobs": (-1.0, -2.0)}, None, 0, True),
        ({"prompt_logprobs": (-1.0, -2.0)}, {"prompt_logprobs": (-1.0, -2.5)}, None, 0, False),
    ],
)
def test_an_answer_is_right_by_its_tokens_and_by_every_log_probability(
    changes, reference, wrong, ties, right
) -> None:
    found = compare(said(**changes), Reference(**REFERENCE | reference))
    assert (found.wrong, found.ties, found.right) == (wrong, ties, right)


@pytest.mark.parametrize(
    "changes", [{"tokens": (7, EOT), "logprobs": (-0.1, -0.3)}, {"prompt_logprobs": (-1.0,)}]
)
def test_a_reference_of_another_answer_compares_with_nothing(changes) -> None:
    with pytest.raises(ValueError, match="zip"):
        compare(said(**changes), Reference(**REFERENCE))


def answer(tokens=(7, EOT), kind="stop", versions=(FIRST,), **meta) -> dict:
    right = {
        "finish_reason": {"type": kind}, "weight_version": versions[-1],
        "weight_versions": [{"version": one} for one in versions],
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "cached_tokens": 3, "num_retractions": 0,
        "cached_tokens_details": {"device": 1, "host": 0, "storage": 2},
    }  # fmt: skip
    return {"output_ids": list(tokens), "meta_info": right | meta}


ASKED = Asked("rid", (1, 2, 3))


def test_a_whole_answer_is_read() -> None:
    found = read_answer(ASKED, answer())
    assert found == said(tokens=(7, EOT), logprobs=(-0.5, -0.5), cached=3, restored=2)
    read_answer(ASKED, answer(tokens=(7,) * ANSWER_TOKENS, kind="length"))


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {"error": {"message": "no"}},
        answer(kind="abort"),
        answer(tokens=(7, 8), kind="stop"),
        answer(tokens=(7, 8), kind="length"),
        answer(output_token_logprobs=[[-0.5, 7, None]]),
        answer(versions=(FIRST, SECOND)),
    ],
)
def test_anything_less_is_a_failed_request(broken) -> None:
    with pytest.raises(RequestFailedError):
        read_answer(ASKED, broken)


def test_prompt_logprobs_must_be_there_if_asked_for() -> None:
    asked = Asked("rid", (1, 2, 3), prompt_logprobs=True)
    found = read_answer(asked, answer(input_token_logprobs=[[None, 1], [-1.0, 2], [-2.0, 3]]))
    assert found.prompt_logprobs == (-1.0, -2.0)
    with pytest.raises(RequestFailedError):
        read_answer(asked, answer())


def test_the_reference_is_asked_with_the_adapter_and_in_no_scope() -> None:
    scope = {"lora_path": "tenant", "extra_key": "x", "cache_salt": "y"}
    body = teacher_forced(Asked("rid", (1, 2, 3), scope), said())
    assert body["lora_path"] == "tenant"
    assert not {"extra_key", "cache_salt"} & set(body)
    assert body["input_ids"] == [1, 2, 3, 7, 8, EOT]
    assert body["logprob_start_len"] == 2
