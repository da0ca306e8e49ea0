"""The states of a cache's requests: all that it and its parts know of a request, in one place.

    of        it is matched or asked for, for the first time, and its state is made
    pending   what requests wait for, which the ranks have not resolved
    drop      it ended, was aborted or retracted: what is held for it is given back, and its state
              is gone. One that was retracted has a new state when it is matched again.

In between a request may stop waiting, for KV (TierState.cancel_kv_wait) or for everything, and its
refresh may end (RefreshState.end_refresh). All of it runs in the scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.refresh.state import RefreshState
from kvtier_sglang.tier.state import TierState
from kvtier_sglang.waits import Wait


@dataclass
class RequestState(TierState, RefreshState):
    """A request that waits or runs. The tier and the refresh see their own part of it.

    node:          the node that it matched last, or that was restored for it; None: it has not
                   been matched, or there is no tier.
    filled:        how many tokens it was to fill then.
    exact_only:    whether it reads exact KV alone; no other is fetched for it.
    edited_from:   the evicted context that it was edited from and waits for (edits.py).
    runs_ahead:    the positions where runs begin that it may go on with behind an edit (edits.py).
    runs_seen:     the index's version when those were looked up, and from which position on.
    trace_context: the OpenTelemetry context of a request that is traced (tracing/); else None.
    traced_match:  the tokens that its last span of a match told, on the device and in the tier.
    """

    node: KvNode | None = None
    filled: int = 0
    exact_only: bool = False
    edited_from: RadixKey | None = None
    runs_ahead: Sequence[int] = ()
    runs_seen: tuple[int, int] | None = None
    trace_context: Any = None
    traced_match: tuple[int, int] | None = None

    def tokens_ahead(self, position: int) -> int | None:
        """Return how many tokens it has to compute from this position on before the next run; None
        where there is none ahead."""
        return next((begin - position for begin in self.runs_ahead if begin > position), None)

    def stop_waiting(self) -> None:
        """Let nothing be fetched for the request any more."""
        self.cancel_kv_wait()
        self.cancel_refresh_wait()

    def weights_change(self) -> None:
        """Neither fetch nor spill for it any more, as the weights are about to change. What runs
        goes on, and its refresh with it."""
        self.stop_waiting()
        self.turn = None

    def end(self) -> None:
        """Give back all that is held for a request that is gone, or will start again."""
        self.stop_waiting()
        self.end_refresh()


class RequestStates(dict[str, RequestState]):
    """The states of one cache's requests, by id, see the module docstring."""

    def of(self, rid: str) -> RequestState:
        """Return a request's state, made where it has none."""
        state = self.get(rid)
        if state is None:
            state = self[rid] = RequestState()
        return state

    @property
    def pending(self) -> list[Wait[Any]]:
        """The waits that the ranks have not resolved, in the order in which they began: the same
        on every rank."""
        waits = [
            wait
            for state in self.values()
            for wait in (state.kv_wait, state.refresh_wait)
            if wait is not None and wait.arrived is None
        ]
        return sorted(waits, key=attrgetter("number"))

    @property
    def are_waiting(self) -> bool:
        """Return whether any request waits, or has not taken what arrived."""
        return any(state.kv_wait or state.refresh_wait for state in self.values())

    def drop(self, rid: str) -> None:
        """Give back what is held for a request, and forget it."""
        state = self.pop(rid, None)
        if state is not None:
            state.end()
