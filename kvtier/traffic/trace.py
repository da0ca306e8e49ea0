"""Recorded traffic in Mooncake's open format, one JSON object a line:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2354]}

`timestamp` is the arrival in ms, lengths are in tokens, and `hash_ids` names each block of 512
input tokens, the last of which may be partly filled. An id digests a block and all before it, so
equal ids are equal prefixes. Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.errors import TracesFileError, UsageError
from kvtier.reading import read_json_lines

# Tokens of a block in the format.
BLOCK_TOKENS = 512
# Of an input or an output: the simulator counts with 32 bits.
MOST_TOKENS = 1 << 30


@dataclass(frozen=True)
class TraceRequest:
    """One request. block_ids: of its input, ceil(input_tokens / block_tokens) of them."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they arrive. block_tokens: of a whole block."""

    requests: tuple[TraceRequest, ...]
    block_tokens: int = BLOCK_TOKENS

    @property
    def duration_s(self) -> float:
        """When the last request arrives."""
        return self.requests[-1].arrival_s

    def whole_blocks(self, request: TraceRequest) -> int:
        """How many of a request's blocks are filled."""
        return request.input_tokens // self.block_tokens

    def first(self, count: int) -> Trace:
        """The first requests alone."""
        return replace(self, requests=self.requests[:count])

    def scaled(self, block_tokens: int, speed: float) -> Trace:
        """The same traffic for another machine: a block becomes `block_tokens` long, inputs and
        outputs shrink or grow alike, and requests arrive `speed` times as fast.

        What begins alike does so afterwards, and every length is at least one token.
        """
        share = block_tokens / self.block_tokens

        def scale(tokens: int) -> int:
            return max(1, round(tokens * share))

        def one(request: TraceRequest) -> TraceRequest:
            before = len(request.block_ids) - 1
            last = request.input_tokens - before * self.block_tokens
            return TraceRequest(
                arrival_s=request.arrival_s / speed,
                input_tokens=before * block_tokens + scale(last),
                output_tokens=scale(request.output_tokens),
                block_ids=request.block_ids,
            )

        return Trace(tuple(map(one, self.requests)), block_tokens)

    def write(self, file: Path) -> None:
        """Write it in the format, whose blocks are of BLOCK_TOKENS."""
        lines = [
            {
                "timestamp": round(1000 * one.arrival_s),
                "input_length": one.input_tokens,
                "output_length": one.output_tokens,
                "hash_ids": one.block_ids,
            }
            for one in self.requests
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_trace(file: Path, argument: str = "--trace") -> Trace:
    """A file's trace. Raises UsageError naming `argument` where there is none, TracesFileError
    naming line and field where it is malformed."""
    requests = sorted(_requests(file, argument), key=lambda request: request.arrival_s)
    if not requests:
        raise UsageError(argument, "a trace of at least one request", str(file))
    return Trace(tuple(requests))


def _requests(file: Path, argument: str) -> Iterator[TraceRequest]:
    before: dict[int, int | None] = {}
    for where, fields in read_json_lines(file, argument, TracesFileError):
        request = _request(where, fields)
        _check_prefixes(where, request, before)
        yield request


def _request(where: str, fields: dict[str, Any]) -> TraceRequest:
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        raise TracesFileError(f"{where}: hash_ids", "a list of whole numbers", ids)
    request = TraceRequest(
        arrival_s=_number(where, fields, "timestamp", least=0) / 1000,
        input_tokens=int(_number(where, fields, "input_length", least=1, most=MOST_TOKENS)),
        output_tokens=int(_number(where, fields, "output_length", least=1, most=MOST_TOKENS)),
        block_ids=tuple(ids),
    )
    wanted = -(-request.input_tokens // BLOCK_TOKENS)
    if len(ids) != wanted:
        expected = f"{wanted} ids for {request.input_tokens} tokens in blocks of {BLOCK_TOKENS}"
        raise TracesFileError(f"{where}: hash_ids", expected, f"{len(ids)} ids")
    return request


def _number(
    where: str, fields: dict[str, Any], name: str, least: float, most: float = math.inf
) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        limit = "" if most == math.inf else f", up to {most}"
        raise TracesFileError(f"{where}: {name}", f"a number of at least {least}{limit}", value)
    return float(value)


def _check_prefixes(where: str, request: TraceRequest, before: dict[int, int | None]) -> None:
    """Equal ids are equal prefixes, so each has one id before it, or none. before: as seen so
    far."""
    last = None
    for one in request.block_ids:
        if before.setdefault(one, last) != last:
            expected = f"block {one} behind the same block as before, {before[one]}"
            raise TracesFileError(f"{where}: hash_ids", expected, last)
        last = one


__all__ = ["BLOCK_TOKENS", "Trace", "TraceRequest", "read_trace"]
