"""The accounts of prompts: how much of each was there, and why the rest was not.

    prompt      [   hit   |  restored  |                computed                 ]
    computed                           [ recomputed: evicted | new | edited | new ]

Tokens are *recomputed* which this server had computed for a request before, and had no more, or
could not use. `split` cuts what is computed where the reasons change, so that they always sum up to
it. A request is accounted once, as far as it has come: what it computes a second time, because it
was retracted, is `retracted`. The last token of a prompt is always computed, as its logits are
wanted, and counts as new.

All of it runs in the scheduler's thread only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtier_sglang.radix.gone import GRAIN, Gone
from kvtier_sglang.radix.index import WINDOW, Run, TokenIndex, path_key
from kvtier_sglang.radix.node import KvNode
from kvtier_sglang.request_options import is_of_a_client
from kvtier_sglang.tier.state import FAILED, LOST, REFUSED

EVICTED, DROPPED, FLUSHED, WEIGHTS = "evicted", "dropped", "flushed", "weights"
CUT, EXACT, EDITED, RETRACTED = "cut", "exact", "edited", "retracted"
OF_EVICTED = (EVICTED, LOST, REFUSED, FAILED)
REASONS = (*OF_EVICTED, CUT, EXACT, EDITED, DROPPED, FLUSHED, WEIGHTS, RETRACTED)
# A request goes on with a session where it has the whole of its last prompt, but for so many
# tokens, or an eighth where that is less: templates end prompts in ways of their own, and borders
# of what is gone are so far apart.
ENDS_OTHERWISE, ENDS_OTHERWISE_PART = GRAIN, 8


class Span(NamedTuple):
    """The tokens [begin, stop) of a prompt. reason: why they are computed again; None: they are
    new."""

    begin: int
    stop: int
    reason: str | None


class Match(NamedTuple):
    """The result of a request's last match.

    cached:     tokens that the tree has in whatever state, the last of them in `node`
    exact:      True where only exact KV was looked for
    changed_at: position at which KV was first copied from behind other text, see Account
    """

    cached: int
    node: KvNode
    exact: bool
    changed_at: int | None


@dataclass
class Account:
    """The account of one request's prompt; see the module docstring.

    tokens:     the number of the prompt's tokens
    extra_key:  the namespace that it was matched in
    session:    the session's name, by its client or by this server; None: not known yet
    changed_at: the position at which it leaves the context that has most of what follows
    covered:    the number of its first tokens, which are accounted
    known:      spans computed before, of what its present life computes; where they overlap the
                first one counts
    arrived_s:  time.time() when it came
    """

    tokens: int
    extra_key: str | None
    arrived_s: float
    session: str | None = None
    hit: int = 0
    restored: int = 0
    computed: int = 0
    recomputed: Counter[str] = field(default_factory=Counter)
    changed_at: int | None = None
    covered: int = 0
    known: Sequence[Span] = ()
    is_running: bool = False

    @property
    def new(self) -> int:
        """The number of tokens that were computed for the first time."""
        return self.computed - sum(self.recomputed.values())

    def have(self, stop: int, restored: int = 0) -> None:
        """Account the first `stop` tokens as there, the last `restored` of them from a tier."""
        there = max(0, min(stop, self.tokens) - self.covered)
        loaded = min(restored, there)
        self.restored += loaded
        self.hit += there - loaded
        self.covered += there

    def compute(self, begin: int, stop: int) -> None:
        """Account that tokens [begin, stop) are computed."""
        for part in split(begin, min(stop, self.tokens), self._told()):
            self.computed += part.stop - part.begin
            if part.reason is not None:
                self.recomputed[part.reason] += part.stop - part.begin
        self.covered = max(self.covered, min(stop, self.tokens))

    def _told(self) -> Iterator[Span]:
        yield Span(0, self.covered, RETRACTED)
        yield from self.known

    def summary(self) -> dict[str, Any]:
        """Return the account's numbers, for people and logs."""
        found: dict[str, Any] = {
            "hit": self.hit,
            "restored": self.restored,
            "computed": self.computed,
            "recomputed": {one: self.recomputed[one] for one in REASONS if self.recomputed[one]},
        }
        return found if self.changed_at is None else {**found, "changed_at": self.changed_at}


def split(begin: int, stop: int, known: Iterator[Span] | Sequence[Span]) -> Iterator[Span]:
    """Yield [begin, stop) in parts that follow each other. known: spans, first to last; where they
    overlap the first one counts."""
    for span in known:
        first, last = max(begin, span.begin), min(stop, span.stop)
        if first < last:
            if begin < first:
                yield Span(begin, first, None)
            yield Span(first, last, span.reason)
            begin = last
    if begin < stop:
        yield Span(begin, stop, None)


class Misses:
    """The accounts of one cache's requests. counters, reasons: the sums over all of them of what an
    Account has; they only grow."""

    def __init__(self) -> None:
        self.gone = Gone()
        self.counters: Counter[str] = Counter(hit=0, restored=0, computed=0, new=0)
        self.reasons: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        # This is time.time() when the first request came.
        self.began_s = 0.0
        self._weights_changed = False
        self._sessions = 0

    # -- what becomes of what was computed --

    def flushed(self, nodes: Iterator[KvNode]) -> None:
        """Remember the nodes of a cache that is flushed."""
        reason = WEIGHTS if self._weights_changed else FLUSHED
        for node in nodes:
            self.gone.add(node, reason)
        self._weights_changed = False

    def weights_change(self) -> None:
        """Note that what is cached will be flushed because the weights change."""
        self._weights_changed = True

    # -- a request --

    def matched(
        self, req: Any, cached: tuple[int, KvNode], held: int, *, exact: bool, copied: bool
    ) -> None:
        """Note the match of a request that waits. `held` tokens of it are there, the last ones just
        copied from behind other text where `copied` says so. cached: see Match."""
        if not is_of_a_client(req):
            return
        if not hasattr(req, "kvtier_account"):
            req.kvtier_account = Account(len(req.origin_input_ids), req.extra_key, arrival(req))
            self.began_s = self.began_s or req.kvtier_account.arrived_s
        before = getattr(req, "kvtier_match", None)
        changed_at = None if before is None else before.changed_at
        if copied and changed_at is None:
            changed_at = min(cached[0], held)
        req.kvtier_match, req.kvtier_loaded = Match(*cached, exact, changed_at), 0

    def computed(
        self,
        req: Any,
        anchor: KvNode,
        stop: int,
        texts: Sequence[TokenIndex],
        miss_reason: str | None,
    ) -> None:
        """Account the tokens that a request computed, from the end of `anchor`, which it has
        locked, to `stop`.

        texts: the indexes that find what stands behind other text. miss_reason: why the tier did
        not bring what it was asked for; None: it was not asked.
        """
        account: Account | None = getattr(req, "kvtier_account", None)
        if account is None:
            return
        if account.extra_key != req.extra_key:
            # Its prefix memory did not know its prompt: it began again, with nothing of it.
            account = Account(account.tokens, req.extra_key, account.arrived_s)
            req.kvtier_account = account
        if anchor.stop >= account.tokens and account.is_running:
            return
        before = replace(account, recomputed=account.recomputed.copy())
        if not account.is_running:
            account.is_running = True
            account.have(anchor.stop, req.kvtier_loaded)
            self._look_up(req, account, anchor, texts, miss_reason)
        account.have(anchor.stop)
        account.compute(anchor.stop, stop)
        # Metrics are read meanwhile by another thread: nothing that is counted ever shrinks.
        for name in self.counters:
            self.counters[name] += getattr(account, name) - getattr(before, name)
        self.reasons.update(account.recomputed - before.recomputed)

    def released(self, req: Any, *, ended: bool) -> Account | None:
        """Close the account of a request that ended, or suspend that of one that will begin again.
        Return it where the request ended and has computed something; else None."""
        account: Account | None = getattr(req, "kvtier_account", None)
        if account is None or not account.is_running:
            return None
        account.is_running = False
        if not ended:
            return None
        for node in req.last_node.path():
            if node.session is not None:
                break
            node.session = account.session
        req.last_node.account = account
        return account

    def report(self) -> dict[str, Any]:
        """Return the sums for the server's internal state."""
        return {**self.counters, "recomputed": dict(self.reasons)}

    def _look_up(
        self,
        req: Any,
        account: Account,
        anchor: KvNode,
        texts: Sequence[TokenIndex],
        miss_reason: str | None,
    ) -> None:
        """Find what was computed before of what a request is about to compute."""
        match: Match = req.kvtier_match
        stop = account.tokens - 1
        ids = req.full_untruncated_fill_ids[:stop]
        key = RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)
        cached = max(match.cached, anchor.stop)
        reached, record = self.gone.reach(key, anchor, cached)
        known = [Span(anchor.stop, cached, EXACT if match.exact else CUT)]
        if record is not None:
            was_evicted = record.reason == EVICTED and miss_reason is not None
            known.append(Span(cached, reached, str(miss_reason) if was_evicted else record.reason))
        runs = [run for text in texts for run in _elsewhere(text, key, reached, anchor)]
        known += [Span(run.begin, run.stop, EDITED) for run in sorted(runs, key=lambda r: r.begin)]
        account.known = known
        if account.changed_at is None:
            account.changed_at = match.changed_at
        longest = max(runs, key=lambda run: run.stop - run.begin, default=None)
        if longest is not None and account.changed_at is None:
            account.changed_at = path_key(longest.node).match(key)
        if account.session is None:
            account.session = self._session(req, match, anchor, reached, record, longest)

    def _session(
        self,
        req: Any,
        match: Match,
        anchor: KvNode,
        reached: int,
        record: Any,
        longest: Run | None,
    ) -> str:
        """Return the session that a request goes on with: the one that its client names, the one
        whose last prompt it has, or a new one."""
        given = getattr(req, "session_id", None)
        if given is not None:
            # Names may be long, and no Unicode; all that is asked of them is which are equal.
            name = str(given).encode("utf-8", "surrogatepass")
            return f"named {blake2b(name, digest_size=16).hexdigest()}"
        last = match.node if match.cached >= anchor.stop else anchor
        candidates = [(last.session, last.prompt_stop, max(match.cached, anchor.stop))]
        if record is not None:
            candidates.insert(0, (record.session, record.prompt_stop, reached))
        if longest is not None:
            node = longest.node
            candidates.append((node.session, node.prompt_stop, longest.stop - longest.shift))
        for session, prompt_stop, has in candidates:
            missing = max(0, prompt_stop - has)
            if session is not None and missing <= min(
                ENDS_OTHERWISE, prompt_stop // ENDS_OTHERWISE_PART
            ):
                return str(session)
        self._sessions += 1
        return f"number {self._sessions}"


def _elsewhere(text: TokenIndex, key: RadixKey, begin: int, anchor: KvNode) -> Iterator[Run]:
    """Yield the runs of key[begin:] that stand behind other tokens; what the prompt itself repeats
    is new."""
    own = {node.id for node in anchor.path()}
    for run in text.runs(key, begin, WINDOW):
        if run.node.id not in own:
            yield run


def arrival(req: Any) -> float:
    """Return time.time() when a request came, as SGLang noted it; now, where it did not."""
    noted = getattr(getattr(req, "time_stats", None), "wait_queue_entry_time", 0.0)
    return time.time() - (time.perf_counter() - noted if noted else 0.0)
