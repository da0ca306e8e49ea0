"""The sweep's plan: every tile and every cut once, and cuts with the tile that was best."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import sweep
from kvtier_kernels.triton_backend.attention import by_lists
from kvtier_kernels.triton_backend.planning import lists


class Entries:
    """Stands for contexts of one byte."""

    num_bytes = 1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record what is measured, in order: a tile of 64 entries and 4 warps is the fastest, and one
    of 128 entries does not run."""
    seen: list[tuple[int, ...]] = []

    def layer_seconds(kernels: Any, contexts: Entries) -> float:
        tile = by_lists.list_tile(128, False, 4, laden=False)
        seen.append((*tile[1:], lists.LEAST_PAGES))
        if tile.entries == 128:
            raise RuntimeError("out of shared memory")
        off = abs(tile.entries - 64) + abs(tile.warps - 4)
        return 1 + off + tile.stages + tile.programs + lists.LEAST_PAGES

    monkeypatch.setattr(sweep, "layer_seconds", layer_seconds)
    monkeypatch.setattr(sweep, "read_bandwidth", lambda: 1.0)
    monkeypatch.setattr(sweep, "TritonKernels", lambda: None)
    monkeypatch.setattr(sweep, "retained", lambda *_, **__: Entries())
    monkeypatch.setattr(sweep, "full", lambda *_, **__: Entries())
    monkeypatch.setattr(sweep, "compile_all", lambda *_, **__: None)
    monkeypatch.setattr(sweep.torch.cuda, "get_device_name", lambda: "a device")
    return seen


def test_cuts_are_tried_with_the_best_tile_and_afterwards_are_as_before(measured, capsys) -> None:
    before = by_lists.list_tile, lists.LEAST_PAGES
    figures = sweep.sweep(0, voted=False, uncompressed=False)
    assert before == (by_lists.list_tile, lists.LEAST_PAGES)
    tiles = [tuple(row["setting"]) for row in figures["tiles"]]
    assert len(set(tiles)) == len(tiles) == 2 * 3 * 3 * 4  # all but those of 128 entries
    assert {one[0] for one in tiles} == {32, 64}
    assert max(figures["tiles"], key=lambda row: row["mean"])["setting"] == [64, 4, 2, 1]
    cuts = [row["setting"] for row in figures["cuts"]]
    assert cuts == [[least] for least in sweep.LEAST_PAGES]
    with_cuts = measured[-len(cuts) * len(sweep.SWEPT) :]
    assert {one[:4] for one in with_cuts} == {(64, 4, 2, 1)}
    assert {one[4] for one in with_cuts} == set(sweep.LEAST_PAGES)
    assert set(figures["tiles"][0]["shares"]) == {str(shape) for shape in sweep.SWEPT}
    capsys.readouterr()


def test_the_run_prints_the_best_and_says_how_it_was_asked(measured, capsys) -> None:
    found = sweep.run(sweep.BENCHMARK.parse(["--full", "--voted"]))
    assert (found.figures["full"], found.figures["voted"]) == (True, True)
    assert found.bars is None
    assert "[64, 4, 2, 1]" in capsys.readouterr().out


def test_a_mean_over_shapes_is_geometric() -> None:
    assert sweep.mean_of({"a": 0.25, "b": 1.0}) == pytest.approx(0.5)


def test_bad_input_names_its_argument(capsys) -> None:
    assert sweep.main(["--seed", "-1"]) == 2
    assert "--seed" in capsys.readouterr().err
