"""The soak's clients against servers that lie: wrong answers and failures are found out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from soak_answers import EOT, RULE, said

from benchmarks.soak.check import Answer, Checker
from benchmarks.soak.client import Asked, RequestFailedError, Said
from benchmarks.soak.clients import KEPT_WHOLE, MOVED, Client, Engine, Gate, Tally
from benchmarks.soak.load import Load, Session
from benchmarks.soak.models import EVERYTHING, FIRST, SECOND

ASKED = Asked("rid", (1, 2, 3))


class Fake:
    """A server whose answers are all one token; the reference's too, unless told otherwise."""

    def __init__(self, *, token: int = 7, fails: bool = False, restored: int = 0) -> None:
        self.token, self.fails, self.restored, self.version = token, fails, restored, FIRST
        self.loaded: list[str] = []

    async def generate(self, asked: Asked) -> Said:
        if self.fails:
            raise RequestFailedError("500")
        prompt = (-1.0,) * (len(asked.prompt) - 1) if asked.prompt_logprobs else ()
        return said(
            tokens=(self.token, EOT), logprobs=(-0.1, -0.1), prompt_logprobs=prompt,
            cached=900, restored=self.restored,
        )  # fmt: skip

    async def load_weights(self, path: str, version: str) -> None:
        self.loaded.append(version)
        self.version = version

    async def post(self, path: str, body: dict) -> dict:
        """Answer as the reference does: token 7 is right."""
        ids = body["input_ids"]
        first = body["logprob_start_len"]
        given = [[None, ids[first]], *([-1.0, one] for one in ids[first + 1 : -2])]
        given += [[-0.1 if ids[-2] == 7 else -5.0, ids[-2]], [-0.1, EOT]]
        tops = [None, *([[-0.1, one]] for one in (*ids[first + 1 : -2], 7, EOT))]
        meta = {"input_token_logprobs": given, "input_top_logprobs": tops}
        return {"meta_info": meta | {"weight_version": self.version}}


TOLD = ["turn", "fork", "prompt logprobs", "scopes", "exact forks", "move"]


def served(fake: Fake, action: str, turns: int = 5) -> tuple[Tally, Checker]:
    """Return what becomes of one client's turns."""

    async def run() -> tuple[Tally, Checker]:
        checker = Checker(Fake(), {FIRST: Path(), SECOND: Path()}, FIRST)
        tally = Tally()
        engines = [Engine("engine", fake, EVERYTHING)]
        client = Client(1, Load(1, "adapter"), engines, checker, tally, RULE)
        comparing = asyncio.create_task(checker.run())
        for number in range(turns):
            await client._do(action, client.sessions[number % len(client.sessions)])
        await checker.done()
        comparing.cancel()
        return tally, checker

    return asyncio.run(run())


@pytest.mark.parametrize("action", TOLD)
def test_wrong_answers_and_failures_are_found_out_and_right_ones_are_not(action) -> None:
    tally, checker = served(Fake(), action)
    kind = checker.kinds[KEPT_WHOLE]
    assert tally.finished == kind.compared >= 5
    assert (kind.wrong_tokens, kind.wrong_logprobs, tally.failed) == (0, 0, 0)
    tally, checker = served(Fake(token=8), action)
    assert checker.kinds[KEPT_WHOLE].wrong_tokens == tally.finished >= 5
    assert "reference [7" in checker.examples[0]
    tally, checker = served(Fake(fails=True), action)
    assert tally.failed == tally.asked >= 5
    assert (tally.finished, checker.kinds) == (0, {})


def test_what_another_rule_stored_is_told_from_what_an_engines_own_rule_did() -> None:
    """The first answer of an engine in a scope alone is told apart, and only if something was
    restored for it."""

    async def run(restored: int) -> Tally:
        fake = Fake(restored=restored)
        checker, tally = Checker(Fake(), {FIRST: Path()}, FIRST), Tally()
        engines = [Engine("A", fake, EVERYTHING), Engine("B", fake, "locality heads")]
        client = Client(1, Load(1, "adapter"), engines, checker, tally, RULE)
        session = Session(client.load.own_text(), {"cache_salt": "own"}, set())
        for engine in (0, 0, 1, 1):
            await client._turn(session, engine=engines[engine])
        return tally

    assert asyncio.run(run(restored=0)).answers == {KEPT_WHOLE: 2, "compressed": 2}
    found = asyncio.run(run(restored=900)).answers
    assert found == {KEPT_WHOLE: 2, MOVED: 1, "compressed": 1}


def test_an_answer_waits_for_a_reference_with_its_weights() -> None:
    async def run() -> Checker:
        fake = Fake()
        checker = Checker(fake, {FIRST: Path("a"), SECOND: Path("b")}, FIRST)
        for version in (FIRST, SECOND, FIRST, SECOND):
            one = said(tokens=(7, EOT), logprobs=(-0.1, -0.1), version=version)
            await checker.put(Answer(KEPT_WHOLE, ASKED, one, "here"))
        comparing = asyncio.create_task(checker.run())
        await checker.done()
        comparing.cancel()
        assert fake.loaded == [SECOND]
        return checker

    assert asyncio.run(run()).versions == {FIRST: 2, SECOND: 2}


def test_a_closed_gate_has_no_client_inside_and_lets_none_in() -> None:
    async def run() -> list[str]:
        gate, said_so = Gate(), []

        async def turns() -> None:
            """Let the event loop turn as often as anything here could need."""
            for _ in range(20):
                await asyncio.sleep(0)

        async def visit(name: str) -> None:
            async with gate.entered():
                said_so.append(f"{name} in")
                await turns()
                said_so.append(f"{name} out")

        async def close() -> None:
            async with gate.closed():
                assert not gate.is_open
                said_so.append("closed")
                later = asyncio.create_task(visit("second"))
                await turns()
                said_so.append("open")
            await later

        first = asyncio.create_task(visit("first"))
        await asyncio.sleep(0)
        await close()
        await first
        return said_so

    expected = ["first in", "first out", "closed", "open", "second in", "second out"]
    assert asyncio.run(run()) == expected
