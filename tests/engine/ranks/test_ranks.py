"""The decisions that ranks take together, in two processes over gloo, as SGLang's ranks talk."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as processes

from kvtier.errors import HeadProfileError
from kvtier_sglang.ranks import Answer, Ranks

ANSWERS = (Answer.AWAITED, Answer.LOST, (0, 64), (0, 128))


@dataclass
class Group:
    """The part of SGLang's GroupCoordinator that is used."""

    rank_in_group: int
    world_size: int = 2
    ranks: tuple[int, ...] = (0, 1)
    cpu_group: Any = None


@dataclass
class Waiting:
    answer: object
    arrived: bool | None = None

    def resolve(self, *, arrived: bool) -> None:
        self.arrived = arrived


def pairs() -> list[tuple[object, object]]:
    return list(product(ANSWERS, ANSWERS))


def one_rank(rank: int, folder: str) -> None:
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    ranks = Ranks(Group(rank))
    assert ranks.first(lambda: f"of {rank}") == "of 0"
    assert ranks.every(rank * 10) == [0, 10]
    with pytest.raises(HeadProfileError, match="no such file"):
        ranks.first(lambda: refuse() if rank == 0 else "well")
    waiting = [Waiting(pair[rank]) for pair in pairs()]
    ranks.resolve_all(waiting)
    Path(folder, f"{rank}").write_text(repr([one.arrived for one in waiting]))
    ranks.resolve_all([])
    dist.destroy_process_group()


def refuse() -> str:
    raise HeadProfileError("no such file")


def test_ranks_agree(tmp_path):
    processes.spawn(one_rank, (str(tmp_path),), nprocs=2)
    first, second = ((tmp_path / f"{rank}").read_text() for rank in (0, 1))
    assert first == second
    for (a, b), arrived in zip(pairs(), eval(first), strict=True):
        if Answer.LOST in (a, b):
            assert arrived is False, "what one rank has lost is lost to all"
        elif Answer.AWAITED in (a, b):
            assert arrived is None, "a rank still waits"
        else:
            assert arrived is (a == b)


def test_a_rank_alone_asks_no_other():
    alone, waiting = Ranks(), [Waiting(answer) for answer in ANSWERS]
    alone.resolve_all(waiting)
    assert [one.arrived for one in waiting] == [None, False, True, True]
    assert alone.first(lambda: 3) == 3
    assert alone.every(3) == [3]
