"""An engine dies behind a router: its sessions go on at another one, also with large requests. That
is so of the production router, and of the one that docs/several-servers.md starts, which keeps
large requests only because it is told to. Engines are stand-ins, routers are real.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from live_server import ask, free_port, listens, running
from routed import ADDRESSES, KEY, MODEL, Router, emulated_cluster, routing
from waiting import wait_for

from deploy.checks.rendering import DEPLOY

# There are so many sessions that an engine without any is as good as impossible; of those that move
# some are enough.
SESSIONS, MOVING = 64, 3
# More than a router keeps by default, as a long context is.
LARGE_BYTES = 2 << 20
KEEPS = "--max-buffered-request-bytes"


def documented(port: int, engines: Sequence[str]) -> list[str]:
    """The command of docs/several-servers.md, with other addresses."""
    page = (DEPLOY.parent / "docs" / "several-servers.md").read_text()
    (command,) = re.findall(r"^smg launch (?:.*\\\n)*.*", page, re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    first = words.index("--worker-urls") + 1
    assert words[first : first + 2] == ["http://one:30000", "http://two:30000"]
    words[first : first + 2] = engines
    words[0] = str(Path(sys.executable).with_name(words[0]))
    return [*words, "--port", str(port), "--prometheus-port", str(free_port())]


def without_keeping(command: Sequence[str]) -> list[str]:
    at = command.index(KEEPS)
    return [*command[:at], *command[at + 2 :]]


def answered_by(port: int, session: int, num_bytes: int = LARGE_BYTES) -> str | None:
    """The address of the engine that answers a request of a session; None where it fails."""
    body = {"model": MODEL, "text": "x" * num_bytes}
    headers = {"Authorization": f"Bearer {KEY}", "x-session-id": f"session-{session}"}
    try:
        status, text = ask(f"http://127.0.0.1:{port}/generate", body, headers)
    except OSError:
        return None
    return str(json.loads(text)["from"]) if status == 200 else None


def test_large_requests_outlive_an_engine_where_the_router_keeps_them(rendered):
    engines_port = free_port()
    production = Router(rendered["production"], engines_port)
    urls = [f"http://{address}:{engines_port}" for address in ADDRESSES.values()]
    keeping, forgetful = free_port(), free_port()
    commands = {port: documented(port, urls) for port in (keeping, forgetful)}
    commands[forgetful] = without_keeping(commands[forgetful])
    dead, alive = ADDRESSES.values()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd")))
        cluster = stack.enter_context(emulated_cluster(folder))
        script = str(Path(__file__).with_name("stand_in_engine.py"))
        engines = {}
        for name, address in ADDRESSES.items():
            command = [sys.executable, script, address, str(engines_port)]
            engines[address] = stack.enter_context(running(command, folder / f"{name}.log"))
            wait_for(lambda address=address: listens(address, engines_port))
            cluster.add(name, address, ready=True, labels=cluster.labels)
        stack.enter_context(routing(production, cluster, folder))
        for port, command in commands.items():
            stack.enter_context(running(command, folder / f"{port}.log"))
        production.knows(*ADDRESSES)
        for port in commands:
            wait_for(lambda port=port: set(homes(port).values()) == {dead, alive})
        moving = {
            port: [session for session, home in homes(port).items() if home == dead][:MOVING]
            for port in (production.port, keeping, forgetful)
        }
        assert all(moving.values())
        engines[dead].kill()
        engines[dead].wait()
        wait_for(lambda: not listens(dead, engines_port))
        went_on = {
            port: [answered_by(port, session) for session in sessions]
            for port, sessions in moving.items()
        }
    assert set(went_on[production.port]) == {alive}
    assert set(went_on[keeping]) == {alive}
    assert None in went_on[forgetful]


def homes(port: int) -> dict[int, str | None]:
    """Return which engine answers which session."""
    return {session: answered_by(port, session, 1) for session in range(SESSIONS)}
