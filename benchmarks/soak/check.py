"""Answers compared with those of an engine without kvtier, token by token and number by number.

The reference is stock SGLang without any cache. It is not asked to answer: it is given prompt and
answer, and says for every token of the answer how probable it found it and which one it would have
said. So it answers whatever was said before, and a tie shows as one:

    right     every token is the reference's first choice
    tie       some are its second, by less than TIE in log-probability
    wrong     a token that it would not have said, or a log-probability that is not its own

A token alone says little about the KV behind it, as a model that recalls well does so from KV that
was compressed, too; its log-probability tells.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.client import Asked, RequestFailedError, Said, Server

# The differences of log-probabilities that count, in nats. Another order of summation makes up to
# 1e-4; KV that was computed over a compressed context may show by less than 1e-3.
TIE = 1e-3
OFF = 3e-4
EXAMPLES = 10
# Requests that the reference computes at a time, and answers that may wait for it.
TOGETHER = 3
MOST_WAITING = 60


@dataclass(frozen=True)
class Reference:
    """The reference's judgement of one answer: the log-probability of each of its tokens, its own
    choice there and that one's log-probability; and of the prompt's tokens from the second on."""

    logprobs: tuple[float, ...]
    choices: tuple[int, ...]
    best: tuple[float, ...]
    prompt_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """ties: tokens; wrong: position of the first wrong token, None without; off: the largest
    difference of a log-probability of answer or prompt."""

    ties: int
    wrong: int | None
    off: float

    @property
    def right(self) -> bool:
        return self.wrong is None and self.off <= OFF


def compare(said: Said, reference: Reference) -> Verdict:
    """Judge an answer. Raises ValueError where the reference is of another one."""
    ties, wrong = 0, None
    steps = zip(said.tokens, reference.choices, reference.logprobs, reference.best, strict=True)
    for position, (token, choice, logprob, best) in enumerate(steps):
        if token == choice:
            continue
        if best - logprob <= TIE:
            ties += 1
        elif wrong is None:
            wrong = position
    pairs = [
        *zip(said.logprobs, reference.logprobs, strict=True),
        *zip(said.prompt_logprobs, reference.prompt_logprobs, strict=True),
    ]
    # A number that is none differs from every number.
    gaps = [abs(a - b) if a == a and b == b else float("inf") for a, b in pairs]
    return Verdict(ties, wrong, max(gaps, default=0.0))


def teacher_forced(asked: Asked, said: Said) -> dict[str, Any]:
    """The request to the reference: prompt and answer, of which it gives log-probabilities."""
    start = 0 if said.prompt_logprobs else len(asked.prompt) - 1
    scope = {name: value for name, value in asked.scope.items() if name == "lora_path"}
    return {
        "input_ids": [*asked.prompt, *said.tokens],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 1,
        **scope,
    }


def read_reference(asked: Asked, said: Said, answer: Any) -> Reference:
    """Return what the reference answered to `teacher_forced`. Raises KeyError or IndexError for
    less."""
    meta = answer["meta_info"]
    count = len(said.tokens)
    given = meta["input_token_logprobs"]
    best = [entry[0] for entry in meta["input_top_logprobs"][-count:]]
    prompt = [entry[0] for entry in given[1:-count]] if said.prompt_logprobs else []
    return Reference(
        logprobs=tuple(entry[0] for entry in given[-count:]),
        choices=tuple(entry[1] for entry in best),
        best=tuple(entry[0] for entry in best),
        prompt_logprobs=tuple(prompt),
    )


@dataclass
class Kind:
    """Answers of one kind that were compared, some of them `restored` from the tier. largest_off:
    of those that were right."""

    compared: int = 0
    restored: int = 0
    tokens: int = 0
    ties: int = 0
    wrong_tokens: int = 0
    wrong_logprobs: int = 0
    largest_off: float = 0.0

    def add(self, said: Said, verdict: Verdict) -> None:
        self.compared += 1
        self.restored += said.restored > 0
        self.tokens += len(said.tokens)
        self.ties += verdict.ties
        self.wrong_tokens += verdict.wrong is not None
        self.wrong_logprobs += verdict.off > OFF
        if verdict.right:
            self.largest_off = max(self.largest_off, verdict.off)


@dataclass(frozen=True)
class Answer:
    """One answer that waits for its comparison. kind: why it has to be exact; where: for people."""

    kind: str
    asked: Asked
    said: Said
    where: str
    exact: bool = True


@dataclass
class Checker:
    """Compares answers in the background. The one reference has one version of the weights at a
    time: answers wait for theirs. weights: by version, their folder.

    kinds: of answers that have to be exact; compressed: of some that need not be, for what the
    comparison would see of them.
    """

    reference: Server
    weights: Mapping[str, Path]
    version: str
    kinds: dict[str, Kind] = field(default_factory=dict)
    compressed: Kind = field(default_factory=Kind)
    versions: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    switches: int = 0
    _waiting: dict[str, deque[Answer]] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _busy: int = 0

    async def put(self, answer: Answer) -> None:
        """Have an answer compared; waits while too many are waiting."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.waiting < MOST_WAITING)
            self._waiting.setdefault(answer.said.version, deque()).append(answer)
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values())) + self._busy

    async def done(self) -> None:
        """Wait until everything was compared."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.waiting == 0)

    async def run(self) -> None:
        """Compare without end. Raises RequestFailedError where the reference fails."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: any(self._waiting.values()))
                version = max(self._waiting, key=self._worth)
                waiting = self._waiting[version]
                batch = [waiting.popleft() for _ in range(min(TOGETHER, len(waiting)))]
                self._busy = len(batch)
                self._changed.notify_all()
            if version != self.version:
                await self.reference.load_weights(str(self.weights[version]), version)
                self.version, self.switches = version, self.switches + 1
            references = await asyncio.gather(*map(self._ask, batch))
            for answer, reference in zip(batch, references, strict=True):
                self.judge(answer, reference)
            async with self._changed:
                self._busy = 0
                self._changed.notify_all()

    def _worth(self, version: str) -> tuple[int, bool]:
        """Orders versions by which is next: the loaded one until the other waits in numbers."""
        waiting = len(self._waiting[version])
        here = version == self.version
        return (waiting + (MOST_WAITING // 2 if here and waiting else 0), here)

    async def _ask(self, answer: Answer) -> Reference:
        said = await self.reference.post("/generate", teacher_forced(answer.asked, answer.said))
        try:
            if said["meta_info"]["weight_version"] != answer.said.version:
                raise RequestFailedError("the reference has other weights than it was told")
            return read_reference(answer.asked, answer.said, said)
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailedError(f"no reference ({error!r}): {str(said)[:300]}") from None

    def judge(self, answer: Answer, reference: Reference) -> None:
        """Count an answer with what the reference says of it."""
        verdict = compare(answer.said, reference)
        if not answer.exact:
            self.compressed.add(answer.said, verdict)
            return
        self.versions[answer.said.version] += 1
        self.kinds.setdefault(answer.kind, Kind()).add(answer.said, verdict)
        if not verdict.right and len(self.examples) < EXAMPLES:
            self.examples.append(
                f"{answer.where} ({answer.kind}, {answer.said.version}, prompt of "
                f"{len(answer.asked.prompt)}, {answer.said.cached} cached, {answer.said.restored} "
                f"restored, scope {answer.asked.scope}): said {list(answer.said.tokens)}, the "
                f"reference {list(reference.choices)}; off by {verdict.off:.2g}"
            )
