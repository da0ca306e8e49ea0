"""A request as its tier knows it: what is fetched for it, and what of it is spilled."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.memory.storage import PrefixMemory
from kvtier.tier.blobs.keys import Scope
from kvtier.tier.prefetch import Landed
from kvtier_sglang.tier.spiller import Turn
from kvtier_sglang.waits import Wait

# These say why what was not on the device did not come from the tier. LOST: it was asked and had it
# not. REFUSED: loading was judged slower than computing, or took too long. FAILED: the tier was
# away, or what it gave could not be used, on this rank or on another.
LOST, REFUSED, FAILED = "lost", "refused", "failed"


@dataclass
class KvWait(Wait[Landed]):
    """A request's wait for exact KV. scope: the place of that KV in the tier."""

    scope: Scope

    def describe(self, result: Landed) -> object:
        return result.begin, result.stop, result.exact_stop, result.places

    def release(self, result: Landed) -> None:
        result.host.release()


@dataclass
class TierState:
    """The tier's part of a request's state.

    memory:        the prefix memory that it was matched behind; None: none.
    kv_wait:       its wait for exact KV; None: nothing is fetched or held for it.
    miss_reason:   why what did not come from the tier has to be computed; None: the tier was not
                   asked.
    turn:          the spilling of what it computes; None: nothing is spilled (yet).
    chunk_began_s: time.monotonic() when its chunk began: at the last match, or where the last chunk
                   ended.
    """

    memory: PrefixMemory | None = None
    kv_wait: KvWait | None = None
    miss_reason: str | None = None
    turn: Turn | None = None
    chunk_began_s: float | None = None

    @property
    def landed(self) -> Landed | None:
        """The exact KV that arrived, still the wait's."""
        return None if self.kv_wait is None else self.kv_wait.result

    def cancel_kv_wait(self) -> None:
        """Let nothing be fetched or held for the request any more."""
        wait, self.kv_wait = self.kv_wait, None
        if wait is not None:
            wait.cancel()

    def cancel_unless(self, memory: str) -> None:
        """Cancel what was asked for behind another memory than `memory`, behind which the request
        is computed; "" for none."""
        if self.kv_wait is not None and self.kv_wait.scope.memory != memory:
            self.cancel_kv_wait()

    def note_drop(self) -> None:
        """Note that what it computes from now on sees KV of which something was dropped."""
        if self.turn is not None:
            self.turn.exact = False
