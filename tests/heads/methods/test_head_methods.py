"""The duties of every head method, whichever the registry holds."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from typing import Any

import pytest
from tiny_llama import RULE, SHAPE, make_ids

from kvtier.errors import UsageError
from kvtier.heads.methods import METHODS, HeadMethod, Target, make_method
from kvtier.heads.methods.base import heads_by_layer
from kvtier.heads.probes.context import HeadProbe, ProbeBatch
from kvtier.heads.probes.quality import kept_heads, measure
from kvtier.heads.samples.questions import CalibrationSample, Question

HEADS = SHAPE.num_layers * SHAPE.num_kv_heads
EVERY_METHOD = pytest.mark.parametrize("name", METHODS)


def make_sample(seed: int) -> CalibrationSample:
    ids = make_ids(60, seed)
    questions = tuple(
        Question(tuple(ids[start : start + 3]), tuple(ids[start + 3 : start + 6]))
        for start in (40, 46, 52)
    )
    return CalibrationSample(tuple(ids[:40]), questions, f"task {seed % 2}")


@pytest.fixture(scope="module")
def probe(model: Any) -> HeadProbe:
    return HeadProbe(model, RULE)


@pytest.fixture(scope="module")
def batches(probe: HeadProbe) -> list[ProbeBatch]:
    return [probe.prepare(make_sample(seed)) for seed in (1, 2)]


@pytest.fixture
def method(name: str) -> HeadMethod:
    return make_method(name)


@EVERY_METHOD
def test_every_head_gets_a_number(method: HeadMethod, batches: list[ProbeBatch]) -> None:
    scores = method.score(batches)
    for matrix in (scores.mean, *scores.per_sample):
        assert [len(row) for row in matrix] == [SHAPE.num_kv_heads] * SHAPE.num_layers
        assert all(math.isfinite(score) for row in matrix for score in row)
    assert len(scores.per_sample) in (0, len(batches))
    assert len(scores.tasks) in (0, len(scores.per_sample))


@EVERY_METHOD
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 1.0])
def test_a_share_is_kept_to_the_head_and_the_same_samples_get_the_same_heads(
    name: str, method: HeadMethod, batches: list[ProbeBatch], share: float
) -> None:
    target = Target(share=share)
    method.check_target(target)
    scores = method.score(batches)
    ca_heads, again = method.select(scores, batches, target), make_method(name)
    assert again.score(batches).mean == scores.mean
    assert again.select(again.score(batches), batches, target) == ca_heads
    chosen = [(layer, head) for layer, row in enumerate(ca_heads) for head in row]
    assert len(chosen) == max(1, round(share * HEADS))
    assert ca_heads == heads_by_layer(chosen, SHAPE.num_layers)
    assert json.loads(json.dumps(vars(method), allow_nan=False)) == vars(method)


@EVERY_METHOD
@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_a_budget_is_held_on_the_samples(
    method: HeadMethod, batches: list[ProbeBatch], probe: HeadProbe, budget: float
) -> None:
    ca_heads = method.select(method.score(batches), batches, Target(budget=budget))
    lost = measure(batches, kept_heads(ca_heads, SHAPE)).loss
    full = measure(batches, probe.full()).loss
    none = measure(batches, kept_heads([()] * SHAPE.num_layers, SHAPE)).loss
    assert lost <= full + budget * max(0.0, none - full) + 1e-9


@EVERY_METHOD
def test_without_a_target_its_own_rule_decides_or_the_flags_are_named(
    method: HeadMethod, batches: list[ProbeBatch]
) -> None:
    if method.has_own_rule:
        method.check_target(Target())
        ca_heads = method.select(method.score(batches), batches, Target())
        assert len(ca_heads) == SHAPE.num_layers
    else:
        with pytest.raises(UsageError, match="--share or --budget"):
            method.check_target(Target())


@EVERY_METHOD
def test_scores_without_data_are_of_the_model_alone(
    method: HeadMethod, batches: list[ProbeBatch], probe: HeadProbe
) -> None:
    if method.data_free:
        other = [probe.prepare(make_sample(3))]
        assert method.score(other).mean == method.score(batches).mean


@EVERY_METHOD
def test_flags_set_arguments_and_belong_to_one_method(name: str) -> None:
    method = METHODS[name]
    assert method.name == name
    arguments = set(inspect.signature(method).parameters)
    own = {option.name for option in method.options}
    assert own | ({"seed"} if method.takes_seed else set()) <= arguments
    others = {o.name for m in METHODS.values() if m is not method for o in m.options}
    assert own.isdisjoint(others)


def test_the_registry_is_read_without_torch() -> None:
    """Every command line reads it, and torch takes seconds to import."""
    code = "import sys, kvtier.cli, kvtier.heads.methods; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
