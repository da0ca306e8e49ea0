"""Turns that a server computes a second time over exact KV, to say what its answers lose.

    a request ──> answered from what is kept ──> its client
        │ one of many (`--shadow-share`): its likeliest tokens are noted, too
        └──> waits until no request is under way ──> prompt and answer once more, over exact KV

Counted are the answer's tokens, and those in whose place exact KV has the same likeliest token.
The divergence is how much likelier the server took what it said to be than exact KV does, in nats:
for answers that are drawn at temperature 1 its mean is the KL divergence of both.

All of it happens in the process that takes requests, at its tokenizer manager, whose clients see
nothing of it. A request that comes meanwhile stops the second computation, which begins again when
nothing is under way. Answers that something else than the model had a part in (grammars, penalties,
biases of logits, beams, adapters) are not compared, nor exact ones.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtier.config import load_settings
from kvtier_sglang import compat
from kvtier_sglang.metrics import ShadowMetrics, name_in_metrics
from kvtier_sglang.request_options import EXACT, PARAMS, SHADOW_RID_PREFIX, asked_of

logger = logging.getLogger(__name__)

# Turns that wait; of more the oldest are given up.
MOST_WAITING = 8
# A turn that requests stopped so often is given up.
MOST_STARTS = 5
# The time between two looks at whether anything is under way, while a turn waits, s.
IDLE_CHECK_S = 0.1
_CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "beam_width")
_PENALTIES = {
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}  # fmt: skip


@dataclass
class Answered:
    """A turn as it was served.

    prompt_ids: its prompt; scope: the tree that its KV is in, as arguments of a request
    ids, logprobs: the answer's tokens, and their log-probabilities as served, nats
    best_ids:   the token that was likeliest in place of each
    starts:     how often it was begun to be computed again
    """

    prompt_ids: list[int]
    scope: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    best_ids: list[int] = field(default_factory=list)
    starts: int = 0


@dataclass
class Counts:
    """Sums over turns: those compared and given up; tokens of answers, and those of them that exact
    KV takes for likeliest, too; the divergence, nats."""

    turns: int = 0
    given_up: int = 0
    tokens: int = 0
    same: int = 0
    nats: float = 0.0


class Shadow:
    """Hooks on SGLang's TokenizerManager. For one event loop."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._draw = random.Random()
        self._share: float | None = None
        self._waiting: deque[Answered] = deque()
        self._running: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._metrics: ShadowMetrics | None = None

    # -- hooks --

    def sending(self, manager: Any, request: Any) -> None:
        """BEFORE TokenizerManager._send_one_request: note one of many requests, and stop what is
        computed again meanwhile."""
        if request.rid.startswith(SHADOW_RID_PREFIX) or not self._is_on(manager):
            return
        if self._running is not None:
            manager.abort_request(self._running)
        state = manager.rid_to_state.get(request.rid)
        is_counted = state is not None and state.obj.log_metrics
        drawn = is_counted and self._draw.random() < (self._share or 0.0)
        if not drawn or not _is_the_models(request):
            return
        scope = {name: getattr(request, name, None) for name in ("extra_key", "cache_salt")}
        # SGLang drops the state with the request, however that ends.
        state.kvtier_answered = Answered(list(request.input_ids), scope)
        if not request.return_logprob:
            request.return_logprob, request.logprob_start_len = True, -1
        # A client is sent what it asked for itself.
        request.top_logprobs_num = max(1, request.top_logprobs_num or 0)

    def answering(self, manager: Any, batch: Any) -> None:
        """BEFORE TokenizerManager._handle_batch_output: note what was said."""
        if not self._share:
            return
        for index, rid in enumerate(batch.rids):
            state = manager.rid_to_state.get(rid)
            answered: Answered | None = getattr(state, "kvtier_answered", None)
            if answered is None:
                continue
            new, best = batch.output_token_logprobs_idx, batch.output_top_logprobs_idx
            if new and new[index] and best and best[index]:
                answered.ids += new[index]
                answered.logprobs += batch.output_token_logprobs_val[index]
                answered.best_ids += [int(one[0]) for one in best[index]]
            reason = batch.finished_reasons[index]
            if reason is not None and reason.get("type") in ("stop", "length") and answered.ids:
                self._wait(manager, answered)

    def _is_on(self, manager: Any) -> bool:
        if self._share is None:
            args = manager.server_args
            # The calibration, which may be in Redis, has no say in this.
            self._share = load_settings().shadow_share if compat.uses_kvtier(args) else 0.0
            if self._share:
                manager.kvtier_shadow = self.counts
            if self._share and manager.enable_metrics:
                self._metrics = ShadowMetrics(name_in_metrics(args))
        return self._share > 0

    def _wait(self, manager: Any, answered: Answered) -> None:
        self._waiting.append(answered)
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._count(Counts(given_up=1))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work(manager))

    async def _work(self, manager: Any) -> None:
        """Compare turns as long as some wait."""
        while self._waiting:
            await asyncio.sleep(IDLE_CHECK_S)
            if manager.rid_to_state or not self._waiting:
                continue
            answered = self._waiting.pop()
            answered.starts += 1
            self._running = f"{SHADOW_RID_PREFIX}{uuid.uuid4().hex}"
            try:
                counts = await _compare(manager, answered, self._running)
            except Exception:
                logger.warning("a shadowed turn failed", exc_info=True)
                counts = Counts(given_up=1)
            finally:
                self._running = None
            if counts is None and answered.starts < MOST_STARTS:
                self._waiting.append(answered)
            else:
                self._count(counts or Counts(given_up=1))

    def _count(self, one: Counts) -> None:
        for name, value in vars(one).items():
            setattr(self.counts, name, getattr(self.counts, name) + value)
        if self._metrics is not None:
            self._metrics.turn(one.tokens, one.same, one.nats)


def shadowed(manager: Any) -> dict[str, Any] | None:
    """Return the counts of a tokenizer manager's shadowed turns; None where none are shadowed, or
    no request came yet."""
    counts: Counts | None = getattr(manager, "kvtier_shadow", None)
    return None if counts is None else asdict(counts)


async def _compare(manager: Any, answered: Answered, rid: str) -> Counts | None:
    """Compute a turn again; None where a request stopped that."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        rid=rid,
        input_ids=[*answered.prompt_ids, *answered.ids],
        sampling_params={
            "max_new_tokens": 0, "temperature": 0, "custom_params": {PARAMS: {EXACT: True}},
        },
        return_logprob=True,
        logprob_start_len=len(answered.prompt_ids) - 1,
        top_logprobs_num=1,
        log_metrics=False,
        **answered.scope,
    )  # fmt: skip
    told: dict[str, Any] = {}
    try:
        async for found in manager.generate_request(request, None):
            told = found
    except Exception:
        if manager.rid_to_state:
            return None
        raise
    meta = told["meta_info"]
    if meta["finish_reason"]["type"] not in ("stop", "length"):
        return None
    # The first place is that of the prompt's last token, which nothing was asked of.
    exact = [logprob for logprob, *_ in meta["input_token_logprobs"][1:]]
    best = [place[0][1] for place in meta["input_top_logprobs"][1:]]
    same = sum(a == b for a, b in zip(answered.best_ids, best, strict=True))
    nats = sum(answered.logprobs) - sum(exact)
    return Counts(turns=1, tokens=len(best), same=same, nats=nats)


def _is_the_models(request: Any) -> bool:
    """Return whether an answer is of text alone, by the model's own probabilities over what is
    kept."""
    params = getattr(request, "sampling_params", None)
    if params is None or not request.input_ids or request.mm_inputs or request.lora_id:
        return False
    if request.return_logprob and request.logprob_start_len >= 0:
        return False
    if asked_of(params.custom_params) or any(getattr(params, one, None) for one in _CONSTRAINTS):
        return False
    return all(getattr(params, name) == usual for name, usual in _PENALTIES.items())
