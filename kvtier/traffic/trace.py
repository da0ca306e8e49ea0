"""Recorded traffic: requests in the order in which they arrive, and blocks that tell which of them
begin alike. `kvtier.traffic.formats` reads it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# A block of the format has so many tokens.
BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceRequest:
    """One request.

    arrival_s: its arrival; for one that waits, the arrival in the recording, or the earliest that
               is possible
    block_ids: the ids of its input's blocks, ceil(input_tokens / block_tokens) of them
    session:   the name of its session, where the trace says one
    delay_s:   the time from the answer before it in its session to its arrival; None where it waits
               for none
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    session: str | None = None
    delay_s: float | None = None


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they arrive. block_tokens: the length of a whole block."""

    requests: tuple[TraceRequest, ...]
    block_tokens: int = BLOCK_TOKENS

    def before(self) -> list[int | None]:
        """Return, for each request, the place of the earlier one whose answer it waits for, or None
        where it waits for none."""
        newest: dict[str, int] = {}
        found: list[int | None] = []
        for index, request in enumerate(self.requests):
            waits = request.session is not None and request.delay_s is not None
            found.append(newest.get(request.session or "") if waits else None)
            if request.session is not None:
                newest[request.session] = index
        return found

    @property
    def duration_s(self) -> float:
        """Return the arrival of the last request."""
        return self.requests[-1].arrival_s

    def whole_blocks(self, request: TraceRequest) -> int:
        """Return the number of a request's blocks that are filled."""
        return request.input_tokens // self.block_tokens

    def first(self, count: int) -> Trace:
        """Return the trace of the first `count` requests alone."""
        return replace(self, requests=self.requests[:count])

    def scaled(self, block_tokens: int, speed: float) -> Trace:
        """Return the same traffic for another machine. A block becomes `block_tokens` long, and
        inputs and outputs shrink or grow alike. Requests arrive, or come after answers, `speed`
        times as fast.

        Requests that begin alike still do so afterwards, and every length is at least one token.
        """
        share = block_tokens / self.block_tokens

        def scale(tokens: int) -> int:
            return max(1, round(tokens * share))

        def one(request: TraceRequest) -> TraceRequest:
            before = len(request.block_ids) - 1
            last = request.input_tokens - before * self.block_tokens
            return replace(
                request,
                arrival_s=request.arrival_s / speed,
                input_tokens=before * block_tokens + scale(last),
                output_tokens=scale(request.output_tokens),
                delay_s=None if request.delay_s is None else request.delay_s / speed,
            )

        return Trace(tuple(map(one, self.requests)), block_tokens)

    def write(self, file: Path) -> None:
        """Write the trace in Mooncake's format, whose blocks are of BLOCK_TOKENS."""
        lines = []
        for one in self.requests:
            said: dict[str, Any] = {
                "timestamp": round(1000 * one.arrival_s),
                "input_length": one.input_tokens,
                "output_length": one.output_tokens,
                "hash_ids": one.block_ids,
            }
            if one.session is not None:
                said["session_id"] = one.session
            if one.delay_s is not None:
                said["delay"] = round(1000 * one.delay_s)
            lines.append(said)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
