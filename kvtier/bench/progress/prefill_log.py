"""The progress of a prefill, read from what SGLang logs of every chunk while it goes on.

    Prefill batch, #new-seq: 1, #new-token: 2048, #cached-token: 0, …

A first turn of 128k takes minutes on a CPU; the worker's own events come when it is over.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+)")
# These lines are what SGLang says of every batch, which is no reason of a failure.
ROUTINE = re.compile(r"(Prefill|Decode) batch")
LOOK_EVERY_S = 0.5


@contextmanager
def following(log: Path, tell: Callable[[int], None]) -> Iterator[None]:
    """Have `tell` hear from a thread, within the block, how many new tokens each chunk has
    computed."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(log, tell, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(log: Path, tell: Callable[[int], None], stop: threading.Event) -> None:
    rest = ""
    with log.open(errors="replace") as lines:
        while not stop.wait(LOOK_EVERY_S):
            *whole, rest = (rest + lines.read()).split("\n")
            for line in whole:
                found = PREFILL.search(line)
                if found is not None:
                    tell(int(found[1]))


__all__ = ["ROUTINE", "following"]
