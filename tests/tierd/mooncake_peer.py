"""Another process with a store of the same mooncake_master.

    with MooncakeMaster() as master, MooncakePeer(options_of(master)) as peer:
        peer.ask("put", 1)
        peer.signal(signal.SIGKILL)

As a program this file is that process: it answers one line for each line of its input.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from typing import Any

from store_blobs import blob_name, get, payload_of, put

from kvtier.errors import TierError
from kvtier_tierd.stores.mooncake.options import MooncakeOptions
from kvtier_tierd.stores.mooncake.store import MooncakeStore

MIB = 1 << 20


class MooncakePeer:
    """A store in another process."""

    def __init__(self, options: MooncakeOptions) -> None:
        command = [sys.executable, __file__, json.dumps(dataclasses.asdict(options))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "ready"

    def ask(self, method: str, number: int, num_bytes: int = MIB) -> Any:
        """put: the blob `number`, True. get: "right", "wrong" or "missing"."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, number, num_bytes]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended: {self.process.poll()}"
        return json.loads(line)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def __enter__(self) -> MooncakePeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


async def serve(options: MooncakeOptions) -> None:
    """The other process: one answer for each line."""
    # Whatever the C++ client may print must not look like an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    store = MooncakeStore(options)
    await store.start()
    print(json.dumps("ready"), file=answers, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        method, number, num_bytes = json.loads(line)
        try:
            answer: Any = await _do(store, method, number, num_bytes)
        except TierError as error:
            answer = repr(error)
        print(json.dumps(answer), file=answers, flush=True)
    await store.close()


async def _do(store: MooncakeStore, method: str, number: int, num_bytes: int) -> Any:
    name, payload = blob_name(number), payload_of(number, num_bytes)
    if method == "put":
        await put(store, name, payload)
        return True
    found = await get(store, name)
    return "missing" if found is None else "right" if found == payload else "wrong"


if __name__ == "__main__":
    asyncio.run(serve(MooncakeOptions(**json.loads(sys.argv[1]))))
