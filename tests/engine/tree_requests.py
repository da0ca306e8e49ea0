"""The requests to the miniature scheduler: tokens, and the fields of SGLang's Req that it has."""

from __future__ import annotations

import itertools
import random
from array import array
from dataclasses import dataclass, field

from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.sampling.sampling_params import SamplingParams

_REQUESTS = itertools.count()


def digest(tokens) -> float:
    """A float32-exact number that depends on every token of a prefix."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return float(value)


@dataclass
class Request:
    """The fields of SGLang's Req that a radix cache reads."""

    prompt: list[int]
    origin_input_ids: array = field(init=False)
    full_untruncated_fill_ids: array = field(init=False)
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    return_logprob: bool = False
    logprob_start_len: int = -1
    already_computed: int = 0
    retracted_stain: bool = False
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    rid: str = field(default_factory=lambda: f"r{next(_REQUESTS)}")
    lock: object = None
    last_node: object = None
    done: bool = False
    prefix_len: int = 0
    filled: int = 0
    extend_end: int = 0
    restored: int = 0
    session_id: str | None = None

    def __post_init__(self) -> None:
        self.origin_input_ids = array("q", self.prompt)
        self.full_untruncated_fill_ids = array("q", self.prompt)

    def finished(self) -> bool:
        return self.done

    @property
    def output_ids(self) -> array:
        return self.full_untruncated_fill_ids[len(self.prompt) :]


def random_tokens(rng: random.Random, count: int) -> list[int]:
    # Few distinct tokens, so that prefixes collide and nodes split often.
    return [rng.randrange(3) for _ in range(count)]


def context(n: int, seed: int = 0) -> list[int]:
    """Tokens that hardly repeat."""
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(n)]
