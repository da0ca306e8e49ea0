"""One line of JSON for each request that ended (`--request-log FILE`), without any text.

    {"timestamp": 12034, "input_length": 2410, "output_length": 96, "hash_ids": [7, 81, …],
     "session_id": "5b0c…", "kvtier": {"hit": 1024, "restored": 0, "computed": 1386,
     "recomputed": {"evicted": 900}, "changed_at": 1024, "block_size": 512, "time": 1764499200.1}}

The first fields are Mooncake's, as kvtier.traffic.formats reads them. `hash_ids` digest blocks of
tokens, each with all before it, and `session_id` a session's name, by a key that is drawn when the
file is opened and is nowhere else: nobody can find out by guessing what a prompt was. So ids of one
life of a server say nothing of those of another, though both may be in one file.

Lines are made and written in a thread of their own. A disk that is full, slow or gone costs lines,
never a request: what waits is bounded, and after a failed write nothing more is written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import secrets
import threading
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kvtier.traffic.trace import BLOCK_TOKENS
from kvtier_sglang.radix.misses import Account

logger = logging.getLogger(__name__)

# At most so many lines wait to be written; a prompt of a million tokens is 8 MB until then.
MOST_WAITING = 256
# The longest that a server which ends waits for them.
CLOSING_S = 5.0


class Ended(NamedTuple):
    """A request that ended, as its line is made of it. input_ids: its prompt's. first_s, arrived_s:
    time.time() when the server's first request and this one came."""

    input_ids: Sequence[int]
    namespace: tuple[str | None, str | None]
    output_tokens: int
    session: str | None
    first_s: float
    arrived_s: float
    told: dict[str, Any]


class RequestLog:
    """The log of the module docstring. The scheduler's thread calls `ended` and `close`."""

    def __init__(self, file: Path) -> None:
        self._file, self._key = file, secrets.token_bytes(32)
        self._waiting: queue.Queue[Ended | None] = queue.Queue(MOST_WAITING)
        # is_on says whether lines are written; lost counts those that were given up.
        self.is_on, self.lost = True, 0
        self._thread = threading.Thread(target=self._run, name="kvtier-request-log", daemon=True)
        self._thread.start()

    def ended(self, req: Any, account: Account, first_s: float) -> None:
        """Log a request that ended, in whatever way. first_s: see Ended."""
        if not self.is_on:
            return
        told = account.summary()
        if getattr(req, "kvtier_moved", 0):
            told["moved"] = req.kvtier_moved
        one = Ended(
            req.origin_input_ids,
            (req.extra_key, req.cache_salt),
            len(req.output_ids),
            account.session,
            first_s,
            account.arrived_s,
            told,
        )
        try:
            self._waiting.put_nowait(one)
        except queue.Full:
            if not self.lost:
                logger.warning("the request log is written too slowly, and lacks requests")
            self.lost += 1

    def close(self) -> None:
        """Write what waits, for CLOSING_S at the most."""
        if not self.is_on:
            return
        self.is_on = False
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSING_S)
            self._thread.join(CLOSING_S)

    def _run(self) -> None:
        try:
            with open(self._file, "ab", buffering=0, opener=_private) as file:
                # A pipe or a device has no size, and is new.
                is_new = not os.fstat(file.fileno()).st_size
                began_s = None if is_new else _began_s(self._file)
                while (one := self._waiting.get()) is not None:
                    began_s = one.first_s if began_s is None else began_s
                    append(file, self.line(one, began_s))
        except Exception:
            self.is_on = False
            logger.warning("the request log failed and is off from now on", exc_info=True)

    def line(self, one: Ended, began_s: float) -> dict[str, Any]:
        """Return a request's line. began_s: time.time() of the file's beginning."""
        line = {
            "timestamp": max(0, round(1000 * (one.arrived_s - began_s))),
            "input_length": len(one.input_ids),
            # Readers want one at least.
            "output_length": max(1, one.output_tokens),
            "hash_ids": list(self._hash_ids(one)),
        }
        if one.session is not None:
            line["session_id"] = self._digest(f"session {one.session}".encode())[:8].hex()
        told = {**one.told, "block_size": BLOCK_TOKENS, "time": round(one.arrived_s, 3)}
        return {**line, "kvtier": told}

    def _hash_ids(self, one: Ended) -> Iterator[int]:
        """Yield an id for each block, of 63 bits: readers take them for signed numbers of 64."""
        before = self._digest(repr(one.namespace).encode())
        for begin in range(0, len(one.input_ids), BLOCK_TOKENS):
            block = array("q", one.input_ids[begin : begin + BLOCK_TOKENS])
            before = self._digest(before + block.tobytes())
            yield int.from_bytes(before[:8], "little") >> 1

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, key=self._key, digest_size=16).digest()


def _private(file: str, flags: int) -> int:
    """Open a file, for its owner alone where it is made: lengths and times say something, too."""
    return os.open(file, flags, mode=0o600)


def append(file: BinaryIO, line: dict[str, Any]) -> None:
    """Append a whole line, or nothing. Raises OSError where there is no room for it."""
    data = json.dumps(line).encode() + b"\n"
    written = file.write(data)
    if written != len(data):
        file.truncate(file.tell() - written)
        raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes of a line were written")


def _began_s(file: Path) -> float:
    """Return time.time() when a log that is gone on with began. Raises whatever reading a file
    raises that is no such log."""
    with file.open("rb") as before:
        line = json.loads(before.readline())
    return float(line["kvtier"]["time"]) - float(line["timestamp"]) / 1000
