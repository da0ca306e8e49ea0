"""Readers of files of recorded traffic. A file whose name ends with .gz is decompressed.

**Mooncake's format**, one request a line:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2354]}

`timestamp` is the arrival in ms, lengths are in tokens, and `hash_ids` names each block of 512
input tokens, the last of which may be partly filled. An id digests a block and all before it, so
equal ids are equal prefixes. Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces. A line
may also have two more fields, as in AIPerf's reading of the format (github.com/ai-dynamo/aiperf):

    "session_id": "a"     the request's session
    "delay": 12000        the request comes so many ms after the answer before it in its session;
                          its `timestamp` is then the time in the recording, and may be missing

**Agents' sessions** as kv-cache-tester records them (github.com/callanjfox/kv-cache-tester), one
session a line:

    {"id": "trace_0001", "block_size": 64, "hash_id_scope": "local", "requests": [
      {"t": 19.0, "in": 72762, "out": 296, "hash_ids": [1, 2, …], "think_time": 12.0, …}, …]}

`t` is the arrival of a request, in s from the session's beginning, and `think_time` is its delay
after the answer before it, in s. `hash_ids` names whole blocks, those of one session alone where
their scope is local. A request of type `subagent` has `requests` of its own, side by side with
those that follow. Sessions have no common clock: the beginning of each is drawn within a given
time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from kvtier.errors import TracesFileError, UsageError
from kvtier.reading import read_json_lines
from kvtier.traffic.trace import BLOCK_TOKENS, Trace, TraceRequest

# The longest input or output: the simulator counts with 32 bits.
MOST_TOKENS = 1 << 30
Lines = Iterable[tuple[str, dict[str, Any]]]


def read_trace(
    file: Path, argument: str = "--trace", *, spread_s: float = 0.0, seed: int = 0
) -> Trace:
    """Return the trace of a file of either format.

    spread_s, seed: agents' sessions begin within `spread_s` seconds, at times drawn from the seed

    Raises UsageError naming `argument` where there is no such file or no request in it, and
    TracesFileError naming line and field where it is malformed.
    """
    lines = read_json_lines(file, argument, TracesFileError)
    first = next(lines, None)
    found: Lines = () if first is None else chain([first], lines)
    is_sessions = first is not None and "requests" in first[1]
    read = _of_sessions(found, spread_s, seed) if is_sessions else _requests(found)
    requests = sorted(read, key=lambda request: request.arrival_s)
    if not requests:
        raise UsageError(argument, "a trace of at least one request", str(file))
    return Trace(tuple(requests))


def _requests(lines: Lines) -> Iterator[TraceRequest]:
    before: dict[int, int | None] = {}
    newest: dict[str, float] = {}
    for where, fields in lines:
        request = _request(where, fields, newest)
        _check_prefixes(where, request, before)
        if request.session is not None:
            newest[request.session] = request.arrival_s
        yield request


def _arrival(
    where: str, fields: dict[str, Any], newest: dict[str, float]
) -> tuple[float, str | None, float | None]:
    """Return a request's arrival in s, its session and its delay in s. newest: the arrival of the
    last request of each session."""
    session, delay = fields.get("session_id"), fields.get("delay")
    if session is not None and not isinstance(session, str):
        raise TracesFileError(f"{where}: session_id", "text", session)
    last = newest.get(session) if session is not None else None
    if delay is None:
        return _number(where, fields, "timestamp", least=0) / 1000, session, None
    if last is None:
        raise TracesFileError(
            f"{where}: delay", "an earlier request with the same session_id", session
        )
    delay_s = _number(where, fields, "delay", least=0) / 1000
    if fields.get("timestamp") is None:
        return last + delay_s, session, delay_s
    return _number(where, fields, "timestamp", least=1000 * last) / 1000, session, delay_s


def _request(where: str, fields: dict[str, Any], newest: dict[str, float]) -> TraceRequest:
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        raise TracesFileError(f"{where}: hash_ids", "a list of whole numbers", ids)
    arrival_s, session, delay_s = _arrival(where, fields, newest)
    request = TraceRequest(
        arrival_s=arrival_s,
        input_tokens=int(_number(where, fields, "input_length", least=1, most=MOST_TOKENS)),
        output_tokens=int(_number(where, fields, "output_length", least=1, most=MOST_TOKENS)),
        block_ids=tuple(ids),
        session=session,
        delay_s=delay_s,
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
    """Check that each block follows the same block as before, as equal ids are equal prefixes.
    before: the id before each id seen so far, which is added to. Raises TracesFileError naming the
    line."""
    last = None
    for one in request.block_ids:
        if before.setdefault(one, last) != last:
            expected = f"block {one} behind the same block as before, {before[one]}"
            raise TracesFileError(f"{where}: hash_ids", expected, last)
        last = one


def _of_sessions(lines: Lines, spread_s: float, seed: int) -> Iterator[TraceRequest]:
    rng, ids, names = random.Random(seed), _Ids(), set[str]()
    for where, fields in lines:
        name, size = fields.get("id"), fields.get("block_size")
        if not isinstance(name, str) or name in names:
            raise TracesFileError(f"{where}: id", "text that no session before has", name)
        names.add(name)
        if not isinstance(size, int) or size < 1 or BLOCK_TOKENS % size:
            expected = f"a whole part of {BLOCK_TOKENS} tokens"
            raise TracesFileError(f"{where}: block_size", expected, size)
        scope = None if fields.get("hash_id_scope") == "global" else name
        begin_s = rng.uniform(0, spread_s)
        yield from _of_session(where, fields, name, begin_s, size, scope, ids)


def _of_session(
    where: str, fields: dict[str, Any], name: str, begin_s: float, size: int, scope: str | None,
    ids: _Ids,
) -> Iterator[TraceRequest]:  # fmt: skip
    """Yield the requests of a session or of a subagent. scope: the name that its hashes belong to;
    None: all sessions share them."""
    asked = fields.get("requests")
    if not isinstance(asked, list) or not all(isinstance(one, dict) for one in asked):
        raise TracesFileError(f"{where}: requests", "a list of requests", asked)
    came_s, ended_s = 0.0, None
    for place, one in enumerate(asked):
        at = f"{where}: requests[{place}]"
        came_s = _number(at, one, "t", least=came_s)
        if one.get("type") == "subagent":
            nested = f"{name}/{place}"
            theirs = None if scope is None else nested
            yield from _of_session(at, one, nested, begin_s + came_s, size, theirs, ids)
            continue
        tokens = int(_number(at, one, "in", least=1, most=MOST_TOKENS))
        hashes = one.get("hash_ids")
        if not isinstance(hashes, list) or not all(isinstance(x, int | str) for x in hashes):
            raise TracesFileError(f"{at}: hash_ids", "a list of numbers or texts", type(hashes))
        if len(hashes) < tokens // size:
            expected = f"{tokens // size} hashes for {tokens} tokens in blocks of {size}"
            raise TracesFileError(f"{at}: hash_ids", expected, len(hashes))
        yield TraceRequest(
            arrival_s=begin_s + came_s,
            input_tokens=tokens,
            output_tokens=max(1, int(_number(at, one, "out", least=0, most=MOST_TOKENS))),
            block_ids=ids.of(scope, hashes[: tokens // size], tokens, BLOCK_TOKENS // size),
            session=name,
            delay_s=None if ended_s is None else _delay(at, one, came_s - ended_s),
        )
        took_s = 0.0 if one.get("api_time") is None else _number(at, one, "api_time", least=0)
        ended_s = came_s + took_s


def _delay(where: str, request: dict[str, Any], recorded_s: float) -> float:
    """Return a request's delay in s after the answer before it. recorded_s: the difference of their
    times, for a request without a think time."""
    if request.get("think_time") is None:
        return max(0.0, recorded_s)
    return _number(where, request, "think_time", least=0)


class _Ids:
    """The ids of blocks of BLOCK_TOKENS, made from the hashes of smaller ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}
        self._fresh = 0

    def of(self, scope: str | None, hashes: list[Any], tokens: int, each: int) -> tuple[int, ...]:
        """Return the ids of an input's blocks. hashes: those of its small blocks, `each` of which
        make one; tokens: the input's length."""
        found: list[int] = []
        before = -1
        for begin in range(0, tokens // BLOCK_TOKENS * each, each):
            key = (scope, before, *hashes[begin : begin + each])
            if key not in self._known:
                self._known[key] = self._next()
            before = self._known[key]
            found.append(before)
        if tokens % BLOCK_TOKENS:
            found.append(self._next())
        return tuple(found)

    def _next(self) -> int:
        self._fresh += 1
        return self._fresh
