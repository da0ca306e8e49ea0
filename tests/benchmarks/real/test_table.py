"""The table of quality over bytes, end to end on a tiny random model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from text_models import write_llama
from torch import Tensor

from benchmarks.real import samples, table
from benchmarks.real.courses import COURSES, Case, Clock, Course, Edited
from benchmarks.real.keeping import (
    ADAPTIVE_RULE,
    Context,
    Keeper,
    Kept,
    NoRoomError,
    settings_at,
)
from benchmarks.real.tables import fewest_bytes
from kvtier.heads.model.config import shape_of
from kvtier.heads.model.loading import load_model
from kvtier.heads.probes.context import HeadProbe
from kvtier.heads.probes.held import Asker, entries, selected
from kvtier.heads.reference.rotation import rotation_of
from kvtier.heads.samples.questions import CalibrationSample
from kvtier.heads.samples.synthetic import make_samples, tasks_for
from kvtier.retention.locality import CUT_WINDOW
from kvtier.retention.shares import FixedShare, Turn
from kvtier.retention.token_worth import TokenWorth, feature_width
from kvtier.synthetic.tokenizer import Tokenizer

TOKENS = 900


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


class Prefilled(NamedTuple):
    """A context, the questions behind it, and what keeps it."""

    sample: CalibrationSample
    context: Context
    asker: Asker
    worth: TokenWorth

    def held(self, course: Any, share: float = 1.0) -> Kept:
        """Return what a course holds of the context."""
        others, ids = [5, 6, 7] * 150, self.sample.context_ids
        return course.held(Case(self.context.model, ids, others, share, self.worth))

    def exact_loss(self) -> float:
        """Return the loss with all tokens held."""
        every = torch.ones(2, 2, TOKENS, dtype=torch.bool)
        layers = selected(self.context.kv, every, self.context.shape.group_size)
        return self.asker.quality(layers).loss


@pytest.fixture(scope="module")
def made(folder: Path) -> Prefilled:
    model = load_model(str(folder))
    sample = make_samples(tasks_for(str(folder)).make, ["key-value"], 1, [TOKENS], 0)[0]
    context = Context(model, shape_of(model), sample)
    return Prefilled(sample, context, Asker(model, sample), drawn_by_lot(context))


def drawn_by_lot(context: Context) -> TokenWorth:
    shape = context.shape
    heads = (shape.num_layers, shape.num_kv_heads)
    width = feature_width(shape.num_kv_heads, shape.head_dim)
    generator = torch.Generator().manual_seed(3)
    return TokenWorth(0.1 * torch.randn(*heads, width, generator=generator))


@pytest.mark.parametrize("share", [0.75, 0.4, 0.25])
def test_no_setting_holds_more_than_its_share(made: Prefilled, share: float) -> None:
    shape = made.context.shape
    order = [(layer, head) for layer in range(2) for head in range(2)]
    every = shape.num_layers * shape.num_kv_heads * TOKENS
    found = 0
    for setting in settings_at(share):
        try:
            keeper = Keeper(made.context, order, setting, made.worth)
        except NoRoomError:
            continue
        used = entries(keeper.kept().layers, shape.group_size) / every
        assert used <= share, setting.name
        found += 1
    assert found >= 3


def test_all_tokens_held_answer_as_the_model_does(made: Prefilled) -> None:
    probe = HeadProbe(made.context.model)
    exact = probe.prepare(made.sample).quality(probe.full())
    assert made.exact_loss() == pytest.approx(exact.loss, rel=1e-4)


@pytest.mark.parametrize(
    "course",
    [Course("", turns=3), *(one for one in COURSES if isinstance(one, Course))],
    ids=lambda one: one.name,
)
def test_a_course_in_which_nothing_is_dropped_answers_as_the_model_does(
    made: Prefilled, course: Course
) -> None:
    held, again, _ = made.held(course)
    assert {layer.k.shape[1] for layer in held} == {TOKENS}
    assert made.asker.quality(held, again).loss == pytest.approx(made.exact_loss(), rel=1e-4)


@pytest.mark.parametrize(
    "course",
    [one for one in COURSES if isinstance(one, Edited) and one.bits is None],
    ids=lambda one: one.name,
)
def test_behind_an_edit_stands_what_was_computed_before_turned_to_its_new_place(
    made: Prefilled, course: Edited
) -> None:
    held, kv = made.held(course).layers, made.context.kv
    # The first layer's KV depends on a token and its position alone.
    for mine, exact in zip(held[0][:2], kv[0], strict=True):
        assert torch.allclose(mine, exact, atol=1e-3)
    first = round(course.places[0] * TOKENS)
    last, exact_last = held[-1].v, kv[-1][1]
    behind = first + course.new_tokens
    assert torch.allclose(last[:, :behind], exact_last[:, :behind], atol=1e-4)
    assert not torch.allclose(last[:, behind:], exact_last[:, behind:], atol=1e-4)


def test_after_many_edits_stands_what_stood_after_one_but_for_rounding(made: Prefilled) -> None:
    once, often = (made.held(Clock("", times)).layers for times in (1, 9))
    for mine, exact in zip(often[0][:2], made.context.kv[0], strict=True):
        # Stored and turned nine times, each time both numbers of a pair are rounded.
        most = 10 * 2**0.5 * 2**-9 * float(exact.abs().max())
        assert torch.allclose(mine, exact, rtol=0, atol=most)
    assert torch.equal(once[0].v[:, 64:], often[0].v[:, 64:])


def test_changed_facts_are_asked_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make = samples.changed_facts(str(folder))
    plain, referred = make_samples(make, samples.CHANGED_FACTS, 2, [TOKENS], 0)
    tokenizer = Tokenizer(str(folder))
    for sample in (plain, referred):
        (question,) = sample.questions
        code = tokenizer.decode(question.answer_ids).strip()
        assert f"is {code}. Nobody" in tokenizer.decode(sample.context_ids)
    said = [samples.REFERENCE in tokenizer.decode(one.context_ids) for one in (plain, referred)]
    assert said == [False, True]
    arguments = ["--model-path", str(folder), "--state", str(tmp_path)]
    assert table.main([*arguments, "--tasks", "qa", samples.PLAIN]) == 2
    assert "changed facts alone" in capsys.readouterr().err


def worth_of_middle(context: Context, fitted: TokenWorth, sink: int, recent: int) -> Tensor:
    """Return the worth as a session has it, which predicts from the tokens alone that it may
    drop."""
    layers, end = [], context.num_tokens - recent
    for layer, (k, v) in enumerate(context.kv):
        rotation = rotation_of(context.model, layer, torch.arange(sink, end))
        middle = fitted.predict(layer, k[:, sink:end], v[:, sink:end], rotation, sink)
        layers.append(torch.nn.functional.pad(middle, (sink, recent)))
    return torch.stack(layers)


def test_one_turn_that_is_refreshed_answers_as_the_setting_of_that_name(made: Prefilled) -> None:
    ctx, share = made.context, 0.24
    # A turn keeps a share of what it may drop, a setting of the whole context.
    sink, recent = ADAPTIVE_RULE.sink_tokens, ADAPTIVE_RULE.recent(ctx.num_tokens)
    edges = sink + recent
    middle = FixedShare(share).choose(Turn(TOKENS, TOKENS - edges)).kept_tokens
    share_kept = (edges + middle + 0.5) / TOKENS
    (setting,) = (
        one for one in settings_at(share_kept) if one.name == "adaptive budgets + refresh"
    )
    middle_alone = copy.copy(ctx)
    middle_alone.worth = lambda fitted: worth_of_middle(ctx, fitted, sink, recent)
    kept = Keeper(middle_alone, [], setting, made.worth).kept()
    theirs = made.asker.quality(kept.layers, kept.refresh)
    held, again, _ = made.held(Course("", refreshes=True), share)
    assert entries(held, ctx.shape.group_size) == entries(kept.layers, ctx.shape.group_size)
    assert made.asker.quality(held, again).loss == pytest.approx(theirs.loss, rel=1e-5)
    assert made.asker.quality(held).loss != pytest.approx(theirs.loss, rel=1e-5)


def test_a_later_turn_is_computed_over_what_its_own_queries_choose(made: Prefilled) -> None:
    """Its KV differs from that which is computed over what heads keep between turns."""
    refreshed, plain = (
        made.held(Course("", turns=2, refreshes=refreshes), 0.24).layers
        for refreshes in (True, False)
    )
    # The last tokens, which all heads keep: of the first layer they depend on nothing before.
    assert torch.equal(refreshed[0].k[:, -4:], plain[0].k[:, -4:])
    assert not torch.allclose(refreshed[1].k[:, -4:], plain[1].k[:, -4:])


@pytest.mark.parametrize("course", COURSES, ids=lambda one: one.name)
def test_a_course_holds_its_share(made: Prefilled, course: Course | Edited | Clock) -> None:
    """A course may hold more by windows, and by whole pages of every turn."""
    held, _, used = made.held(course, 0.25)
    used = (entries(held, made.context.shape.group_size) if used is None else used) / 4
    least, more = 0.2, 20
    if isinstance(course, Edited):
        more = len(course.places) * (CUT_WINDOW + course.new_tokens)
        # Four bits, and scales.
        least *= 1 if course.bits is None else 5 / 16
    elif isinstance(course, Clock):
        more = course.new_tokens
    elif course.is_branch:
        more = CUT_WINDOW
    else:
        more *= course.turns
    assert least * (TOKENS - CUT_WINDOW) <= used <= 0.3 * TOKENS + more


def test_a_run_writes_the_table_and_another_measures_nothing_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        *("--model-path", str(folder), "--lens", str(TOKENS), "--shares", "0.5"),
        *("--contexts", "2", "--choose-len", "600", "--choose-contexts", "1"),
        *("--fit-contexts", "2", "--fit-lens", "600", "--curve-lens", "600"),
        *("--fit-tasks", "quotation", "qa"),
        *("--state", str(tmp_path / "state")),
        *("--tasks", "key-value", "--plots", str(tmp_path)),
    ]
    out = tmp_path / "table.json"
    assert table.main([*arguments, "--out", str(out)]) == 0
    picture = (tmp_path / f"real-table-{TOKENS}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    first = json.loads(out.read_text())["kept"]
    assert {"head profile", "adaptive budgets + refresh"} <= {row["way"] for row in first}
    courses = {course.name for course in COURSES}
    assert courses <= {row["way"] for row in first}
    assert all(row["bytes"] <= row["share"] for row in first if row["way"] not in courses)
    (by_quality,) = (row for row in first if row["way"] == table.BY_QUALITY)
    assert by_quality["quality"] > 0
    assert by_quality["least_bytes"] <= by_quality["bytes"] <= by_quality["most_bytes"]
    with monkeypatch.context() as nothing_measures:
        nothing_measures.setattr(Asker, "quality", None)
        assert table.main([*arguments, "--out", str(out)]) == 0
    assert json.loads(out.read_text())["kept"] == first
    # There are as many shares, but another one.
    assert table.main([*arguments, "--shares", "0.6", "--out", str(out)]) == 0
    again = json.loads(out.read_text())["kept"]
    assert {row["share"] for row in again if row["way"] != table.BY_QUALITY} == {0.6}


@pytest.mark.parametrize("flag", ["--tasks", "--fit-tasks", "--settings"])
def test_what_there_is_none_of_is_refused_by_name(
    folder: Path, tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model-path", str(folder), "--state", str(tmp_path / "state"), flag, "other"]
    assert table.main([*arguments, "--out", str(tmp_path / "table.json")]) == 2
    assert f"{flag}: expected some of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("points", "quality", "fewest"),
    [
        # Between two shares that were measured.
        ([(0.1, 0.8), (0.5, 1.0), (0.25, 0.9)], 0.95, 0.375),
        ([(0.1, 0.8), (0.5, 1.0), (0.25, 0.9)], 0.9, 0.25),
        # From above: it is lost, and had again with fewer bytes.
        ([(0.5, 1.0), (0.25, 0.9), (0.1, 0.96)], 0.95, 0.375),
        ([(0.5, 1.0), (0.1, 0.97)], 0.95, 0.1),
        ([(0.5, 0.9), (0.1, 0.2)], 0.95, None),
    ],
)
def test_the_fewest_bytes_for_a_quality(points, quality, fewest) -> None:
    assert fewest_bytes(points, quality) == (fewest and pytest.approx(fewest))
