"""What a refresh is told of forward passes, to choose entries again with the queries of a turn."""

from __future__ import annotations

from typing import Protocol

import torch


class PassRefresh(Protocol):
    """See the module docstring."""

    @property
    def watches_decoding(self) -> bool:
        """Whether decode passes matter."""

    def begin_prefill(
        self,
        rids: list[str],
        requests: list[int],
        stops: list[int],
        q_indptr: tuple[int, ...],
        rows: torch.Tensor,
    ) -> None:
        """A prefill pass begins; see Refresher.begin_pass."""

    def layer(self, index: int, q: torch.Tensor, scale: float) -> None:
        """A layer of it has stored its KV, and attends next."""

    def end_pass(self) -> None:
        """Its last layer has been told of."""

    def begin_decode(self, rids: list[str], requests: list[int], rows: torch.Tensor) -> None:
        """A decode pass begins; see RefreshTrigger.begin_pass."""

    def record(self, index: int, q: torch.Tensor) -> None:
        """The queries of one of its layers."""


def no_refresh() -> None:
    """For a backend whose contexts are never refreshed."""


__all__ = ["PassRefresh", "no_refresh"]
