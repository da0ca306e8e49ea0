"""The sweep's plan: every tile and every cut once, and cuts with the tile that was best."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import sweep
from kvtier_kernels.triton_backend.planning import plans


class Tile(tuple):
    """Stands for kernels: what is measured depends on the tile and the cut alone."""


class Entries:
    """Stands for a class of heads of one byte."""

    heads, num_bytes = 2, 1

    def planned_by(self, kernels: Any) -> Entries:
        return self


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was measured, in order: a tile of 64 entries and 4 warps is the fastest, and one of 128
    entries does not run."""
    seen: list[tuple[Any, ...]] = []

    def layer_seconds(kernels: Tile, classes: list[Entries], batch: int) -> float:
        seen.append((*kernels, plans.UNITS_PER_SM, plans.LEAST_STRETCH, batch))
        if kernels[0] == 128:
            raise RuntimeError("out of shared memory")
        return 1 + abs(kernels[0] - 64) + abs(kernels[1] - 4) + kernels[2] + plans.UNITS_PER_SM

    monkeypatch.setattr(sweep, "layer_seconds", layer_seconds)
    monkeypatch.setattr(sweep, "read_bandwidth", lambda: 1.0)
    monkeypatch.setattr(sweep, "kernels_with", lambda *tile: Tile(tile))
    monkeypatch.setattr(sweep, "TritonKernels", lambda: None)
    monkeypatch.setattr(sweep, "both_classes", lambda *_, **__: [Entries(), Entries()])
    monkeypatch.setattr(sweep, "make_class", lambda *_, **__: Entries())
    monkeypatch.setattr(sweep, "compile_all", lambda *_, **__: None)
    monkeypatch.setattr(sweep.torch.cuda, "get_device_name", lambda: "a device")
    return seen


def test_cuts_are_tried_with_the_best_tile_and_afterwards_are_as_before(measured, capsys) -> None:
    before = plans.UNITS_PER_SM, plans.LEAST_STRETCH
    figures = sweep.sweep(0, voted=False, full=False)
    assert before == (plans.UNITS_PER_SM, plans.LEAST_STRETCH)
    tiles = [tuple(row["setting"]) for row in figures["tiles"]]
    assert len(set(tiles)) == len(tiles) == 3 * 4 * 3  # all but those of 128 entries
    assert {one[0] for one in tiles} == {16, 32, 64}
    assert max(figures["tiles"], key=lambda row: row["mean"])["setting"] == [64, 4, 2]
    cuts = [tuple(row["setting"]) for row in figures["cuts"]]
    assert len(set(cuts)) == len(cuts) == len(sweep.UNITS_PER_SM) * len(sweep.LEAST_STRETCH)
    with_cuts = measured[-len(cuts) * len(sweep.SWEPT) :]
    assert {one[:3] for one in with_cuts} == {(64, 4, 2)}
    assert {one[3:5] for one in with_cuts} == set(cuts)
    assert set(figures["tiles"][0]["shares"]) == {str(shape) for shape in sweep.SWEPT}
    capsys.readouterr()


def test_the_run_prints_the_best_and_says_how_it_was_asked(measured, capsys) -> None:
    found = sweep.run(sweep.BENCHMARK.parse(["--full", "--voted"]))
    assert (found.figures["full"], found.figures["voted"]) == (True, True)
    assert found.bars is None
    assert "[64, 4, 2]" in capsys.readouterr().out


def test_a_mean_over_shapes_is_geometric() -> None:
    assert sweep.mean_of({"a": 0.25, "b": 1.0}) == pytest.approx(0.5)


def test_bad_input_names_its_argument(capsys) -> None:
    assert sweep.main(["--seed", "-1"]) == 2
    assert "--seed" in capsys.readouterr().err
