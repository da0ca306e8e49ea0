"""The soak's clients: each holds a few sessions and does one thing after the other with them, on
whichever engine; what has to be exact goes to the checker."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime

import aiohttp

from benchmarks.soak.check import EXAMPLES, Answer, Checker
from benchmarks.soak.client import Asked, RequestFailedError, Said, Server
from benchmarks.soak.load import (
    ABORTS,
    ACTIONS,
    OPEN_SESSIONS,
    Load,
    Session,
    exact_forks,
    why_exact,
)
from benchmarks.soak.models import EVERYTHING, FIRST
from kvtier.retention.locality import LocalityRule

KEPT_WHOLE, FORK, MOVED = "everything kept", "exact fork", "another rule's KV"
# Every how many answers that need not be exact one is shown to the reference, too.
SHOWN = 4
THINKING_S = 0.4
# Share of a session's turns that go to its home for certain; of the others half do by chance.
STAYING = 0.6


class Gate:
    """Lets all clients ask an engine, or none, once those that did have their answers. closings:
    how often it was none."""

    def __init__(self) -> None:
        self._inside, self._closed = 0, False
        self.closings = 0
        self._changed = asyncio.Condition()

    @property
    def is_open(self) -> bool:
        return not self._closed

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """No client is inside."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._closed, self.closings = True, self.closings + 1
            await self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            self._closed = False
            async with self._changed:
                self._changed.notify_all()


@dataclass
class Engine:
    """policy: by which it keeps what it serves, EVERYTHING or one of soak_models.POLICIES; version:
    of its weights, as it was told last."""

    name: str
    server: Server
    policy: str
    version: str = FIRST
    gate: Gate = field(default_factory=Gate)


@dataclass
class Tally:
    """The answers that the clients saw."""

    asked: int = 0
    finished: int = 0
    failed: int = 0
    given_up: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def fail(self, where: str, error: RequestFailedError) -> None:
        self.failed += 1
        if len(self.examples) < EXAMPLES:
            now = datetime.now().strftime("%H:%M:%S")
            self.examples.append(f"{now}, {where}: {error}")


class Client:
    """One client. Everything random comes from its seed, but not when answers come."""

    def __init__(
        self,
        number: int,
        load: Load,
        engines: Sequence[Engine],
        checker: Checker,
        tally: Tally,
        rule: LocalityRule,
    ) -> None:
        self.number, self.load, self.engines = number, load, engines
        self.checker, self.tally, self.rule = checker, tally, rule
        self.rng = random.Random(f"{load.seed} client {number}")
        self._requests = self._sessions_made = 0
        self.sessions = [self._session() for _ in range(OPEN_SESSIONS)]

    async def run(self, stopping: asyncio.Event) -> None:
        """Everything once, each client beginning with something else; then at random, until told to
        stop."""
        once = [*ACTIONS, *ACTIONS][self.number % len(ACTIONS) :][: len(ACTIONS)]
        while not stopping.is_set():
            action = once.pop() if once else self.rng.choices([*ACTIONS], [*ACTIONS.values()])[0]
            self.tally.actions[action] += 1
            place = self.rng.randrange(OPEN_SESSIONS)
            await self._do(action, self.sessions[place])
            if action == "leave" or self.sessions[place].over:
                self.sessions[place] = self._session()
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), self.rng.random() * THINKING_S)

    async def _do(self, action: str, session: Session) -> None:
        match action:
            case "turn" | "prompt logprobs":
                await self._turn(session, measured=action == "prompt logprobs")
            case "fork":
                await self._ask(session, session.fork(self.rng), engine=self._engine(session))
            case "abort":
                await self._give_up(session)
            case "scopes":
                await self._scopes()
            case "exact forks":
                await self._exact_forks()
            case "move":
                await self._move()

    def _session(self) -> Session:
        self._sessions_made += 1
        return self.load.session(self.rng, f"client {self.number} session {self._sessions_made}")

    def _engine(self, session: Session | None = None) -> Engine:
        """Any that takes requests, most often a session's home; any where none does."""
        if session is not None and self.rng.random() < STAYING:
            home = self.engines[session.home % len(self.engines)]
            if home.gate.is_open:
                return home
        ready = [engine for engine in self.engines if engine.gate.is_open]
        return self.rng.choice(ready or list(self.engines))

    def _request(self, prompt: Sequence[int], scope: dict[str, str], *, measured: bool) -> Asked:
        self._requests += 1
        rid = f"soak-{self.number}-{self._requests}"
        stream = self.rng.random() < 0.4
        return Asked(rid, tuple(prompt), scope, stream, prompt_logprobs=measured)

    # -- what it does --

    async def _turn(
        self, session: Session, *, measured: bool = False, engine: Engine | None = None
    ) -> None:
        prompt = session.prompt()
        engine = engine or self._engine(session)
        said = await self._ask(session, prompt, measured=measured, engine=engine)
        if said is not None:
            session.answered(prompt, said)

    async def _give_up(self, session: Session) -> None:
        """Ask for the next turn and end it before its answer is there."""
        how = self.rng.choice(ABORTS)
        engine = self._engine(session)
        asked = self._request(session.prompt(), session.scope, measured=False)
        after = self.rng.random() * 0.5
        self.tally.given_up += 1
        self.tally.actions[how] += 1
        async with engine.gate.entered():
            if session.met is not None:
                session.met.add(engine.policy)
            with suppress(RequestFailedError, aiohttp.ClientError, TimeoutError):
                if how == "hang up while it streams":
                    async with engine.server.streaming(asked) as chunks:
                        async for _ in chunks:
                            if self.rng.random() < 0.4:
                                break
                elif how == "hang up at once":
                    await asyncio.wait_for(engine.server.post("/generate", asked.body()), after)
                else:
                    waiting = asyncio.create_task(engine.server.generate(asked))
                    await asyncio.sleep(after)
                    aborting = engine.server.abort(asked.rid)
                    await asyncio.gather(waiting, aborting, return_exceptions=True)

    async def _scopes(self) -> None:
        """The same prompt in all scopes at once, on one engine."""
        text = self.load.short_text(self.rng)
        self._sessions_made += 1
        scopes = self.load.scopes(f"client {self.number} scope {self._sessions_made}")
        prompt = (*text.context, *self.rng.choice(text.questions))
        engine = self._engine()
        sessions = [Session(text, scope) for scope in scopes]
        await asyncio.gather(*(self._ask(one, prompt, engine=engine) for one in sessions))

    async def _exact_forks(self) -> None:
        """A context of its own; then forks of it, each of which has to be exact everywhere."""
        text = self.load.own_text()
        self._sessions_made += 1
        scope = {"cache_salt": f"client {self.number} forks {self._sessions_made}"}
        session = Session(text, scope)
        if await self._ask(session, session.prompt()) is None:
            return
        for prompt in exact_forks(text, self.rule):
            if await self._ask(session, prompt, kind=FORK) is None:
                return

    async def _move(self) -> None:
        """A context of its own, whose second turn goes to another engine than its first."""
        self._sessions_made += 1
        scope = {"cache_salt": f"client {self.number} move {self._sessions_made}"}
        session = Session(self.load.own_text(), scope, set())
        for engine in self.rng.sample(self.engines, len(self.engines)):
            if engine.gate.is_open:
                await self._turn(session, engine=engine)

    # -- one request --

    async def _ask(
        self,
        session: Session,
        prompt: Sequence[int],
        *,
        measured: bool = False,
        kind: str | None = None,
        engine: Engine | None = None,
    ) -> Said | None:
        """Ask an engine and have the answer compared where it has to be exact; None where it
        failed. kind: why it has to be."""
        met = session.met
        engine = engine or self._engine()
        asked = self._request(prompt, session.scope, measured=measured)
        async with engine.gate.entered():
            # In here it does not change, only while the gate is closed.
            policy = engine.policy
            moved = bool(met) and policy not in (met or ())
            if met is not None:
                met.add(policy)
            self.tally.asked += 1
            try:
                said = await engine.server.generate(asked)
            except RequestFailedError as error:
                self.tally.fail(f"{engine.name}, {asked.rid}", error)
                return None
        self.tally.finished += 1
        why: str | None = KEPT_WHOLE
        if policy != EVERYTHING:
            why = why_exact(self.rule, prompt, said, short=session.text.short, measured=measured)
            if why is None and kind is not None and not said.retracted:
                why = kind
        if moved and said.restored and not said.retracted:
            # Another rule stored what this one restores of sessions that it has never served: only
            # what was computed with nothing dropped has names that all rules find.
            why = MOVED
        await self._compare(engine, policy, why, asked, said)
        return said

    async def _compare(
        self, engine: Engine, policy: str, why: str | None, asked: Asked, said: Said
    ) -> None:
        where = f"{engine.name} by {policy}, {asked.rid}"
        if why is not None:
            self.tally.answers[why] += 1
            await self.checker.put(Answer(why, asked, said, where))
            return
        self.tally.answers["compressed"] += 1
        if self.tally.answers["compressed"] % SHOWN == 0:
            await self.checker.put(Answer("compressed", asked, said, where, exact=False))
