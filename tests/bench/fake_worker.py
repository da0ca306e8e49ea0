"""A worker whose engine is a few lines of Python: it recalls by searching the prompt.

FAKE_WORKER=crash makes the engine fail to start, FAKE_WORKER=hang makes it wait with a child
process, whose pid goes to the file FAKE_WORKER_PID.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvtier.bench import worker
from kvtier.bench.engine import Answer, Arrival, Scored
from kvtier.bench.schema import Occupancy, Plan
from kvtier.synthetic.recall import DEFAULT_LANGUAGE, NUM_CODES

INVENTED = tuple(DEFAULT_LANGUAGE.codes[:NUM_CODES])


class FakeEngine:
    """Answers at once; keeps whole sequences, least recently used out first."""

    device = "fake"

    def __init__(self, plan: Plan) -> None:
        self.policy = plan.policy
        self.capacity_tokens = plan.pools.max_total_tokens
        self.kept: list[tuple[int, ...]] = []
        self.peak_tokens = 0
        self.requests: list[tuple[int, ...]] = []
        self.scored: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.closed = False

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
    ) -> Answer:
        prompt = tuple(input_ids)
        self.requests.append(prompt)
        best = max(self.kept, key=lambda kept: _common(kept, prompt), default=())
        cached = _common(best, prompt)
        output = self._say(prompt, stop_ids[0])[:max_new_tokens]
        if best and cached == len(best):
            self.kept.remove(best)
        self.kept.append(prompt + output[:-1])
        while sum(map(len, self.kept)) > self.capacity_tokens and len(self.kept) > 1:
            self.kept.pop(0)
        self.peak_tokens = max(self.peak_tokens, self._tokens())
        computed = len(prompt) - cached
        return Answer(output, cached, float(computed), computed + 2.0 * (len(output) - 1))

    def replay(
        self, arrivals: Sequence[Arrival], tell: Callable[[int, Answer], None]
    ) -> list[Answer]:
        """One after the other, at once; every answer has the tokens that were asked for."""
        answers = []
        for index, arrival in enumerate(arrivals):
            short = self.generate(arrival.input_ids, 1, [DEFAULT_LANGUAGE.eot])
            latency_ms = short.ttft_ms + 2.0 * (arrival.output_tokens - 1)
            said = (7,) * arrival.output_tokens
            answers.append(replace(short, output_ids=said, latency_ms=latency_ms))
            tell(index, answers[-1])
        return answers

    def _say(self, prompt: tuple[int, ...], stop_id: int) -> tuple[int, ...]:
        """The codes behind the asked name's first appearance, or invented ones."""
        name = prompt[-3:-1]
        for at in range(len(prompt) - 3):
            codes = prompt[at + 2 : at + 2 + NUM_CODES]
            known = all(code in DEFAULT_LANGUAGE.codes for code in codes)
            if prompt[at : at + 2] == name and known and len(codes) == NUM_CODES:
                return (*name, *codes, stop_id)
        return (*name, *INVENTED, stop_id)

    def score(self, input_ids: Sequence[int], wanted_ids: Sequence[int]) -> Scored:
        """Half of the probability is on what it says."""
        self.scored.append((tuple(input_ids), tuple(wanted_ids)))
        prompt, behind = self._asked(tuple(input_ids))
        said = self._say(prompt, DEFAULT_LANGUAGE.eot)[behind:][: len(wanted_ids)]
        said += (DEFAULT_LANGUAGE.eot,) * (len(wanted_ids) - len(said))
        likely = [0.5 if a == b else 0.1 for a, b in zip(said, wanted_ids, strict=True)]
        cached = max(_common(kept, tuple(input_ids)) for kept in self.kept)
        return Scored(said, tuple(math.log(each) for each in likely), cached)

    @staticmethod
    def _asked(prompt: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """A prompt up to its last question, and how many tokens of an answer are behind that."""
        end = len(prompt) - prompt[::-1].index(DEFAULT_LANGUAGE.assistant)
        return prompt[:end], len(prompt) - end

    def _tokens(self) -> int:
        return sum(map(len, self.kept))

    def occupancy(self) -> Occupancy:
        per_token = 25 if self.policy == "kvtier" else 100
        tokens, peak = self._tokens(), self.peak_tokens
        self.peak_tokens = tokens
        return Occupancy(
            kv_used_bytes=per_token * tokens,
            kv_peak_bytes=per_token * peak,
            kv_capacity_bytes=100 * self.capacity_tokens,
        )

    def flush(self) -> None:
        self.kept.clear()

    def close(self) -> None:
        self.closed = True


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix, always leaving one token to compute."""
    length = 0
    for a, b in zip(left, right[:-1], strict=False):
        if a != b:
            break
        length += 1
    return length


def open_engine(plan: Plan) -> FakeEngine:
    match os.environ.get("FAKE_WORKER"):
        case "crash":
            raise RuntimeError("no such weights")
        case "hang":
            child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
            Path(os.environ["FAKE_WORKER_PID"]).write_text(str(child.pid))
            signal.pause()
    return FakeEngine(plan)


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:], open_engine))
