"""Requests that begin with a memory's prefix, in the real engine: their tokens are those of the
reference behind that memory, whatever else is in the batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import POLICIES, RULE
from engine_process import DEMO_MODEL, retractions, run_engine, run_script
from sessions import said, tokens

from benchmarks.common.engines import ranks_on_a_cpu
from kvtier.heads.reference.attention import AttentionState
from kvtier.heads.reference.compaction import AdaptiveSession
from kvtier.heads.reference.rotation import rotation_of
from kvtier.heads.reference.session import ClassCache
from kvtier.heads.tokens import fit_tokens
from kvtier.memory.collecting import prefix_kv
from kvtier.memory.prefixes import Asked, ExactPrefix, MemoryPrefix, Prefix, generate_behind
from kvtier.memory.storage import save
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import FixedShare, Turn

pytestmark = pytest.mark.engine

ENGINE = {
    "model_path": str(DEMO_MODEL),
    "max_total_tokens": 8000,
    "chunked_prefill_size": 32,
    **POLICIES["kvtier"],
}
NEW = 6
FUZZER = Path(__file__).parents[1] / "fuzz_runner.py"


def expected(
    model: Any,
    prefix: Prefix,
    length: int,
    turns: Sequence[Sequence[int]],
    kv_dtype: torch.dtype | None = None,
) -> list[list[int]]:
    """Turn by turn, where nothing of a context is dropped."""
    context, answers = list[int](), list[list[int]]()
    for turn in turns:
        context += turn
        answers.append(generate_behind(model, prefix, length, context, NEW, kv_dtype))
        context += answers[-1]
    return answers


@pytest.mark.parametrize(
    ("ranks", "environment"),
    [(2, {}), (1, {"SGLANG_TEST_RETRACT": "1"})],
    ids=["two ranks", "retracted"],
)
def test_tokens_are_those_of_the_reference_in_mixed_batches(
    tmp_path, model, stored, env, ranks, environment
):
    """Two memories and requests without one, chunked prefills, two turns of which nothing is
    dropped, and another second turn; one request leaves its memory by its own wish, and has the
    exact prefix, which is compressed when its turn ends. States are per head; what decides the
    lookup is added up over ranks."""
    rng = random.Random(3)
    sessions = [(0, 40), (1, 55), (None, 50), (0, 3), (1, 1), (None, 20), ("exact", 10)]
    rounds, wanted = [[], [], []], []
    for index, (which, count) in enumerate(sessions):
        own, second = tokens(rng, count), tokens(rng, 15)
        other = second[::-1]
        at = 0 if which == "exact" else which
        first = own if at is None else [*stored[at].prefix, *own]
        extra = {"custom_params": {"kvtier_memory": False}} if which == "exact" else {}
        rounds[0].append({"input_ids": first, "max_new_tokens": NEW, **extra})
        for turn, prompt in ((1, second), (2, other)):
            rounds[turn].append(
                {"input_ids": prompt, "max_new_tokens": NEW, "continues": [0, index], **extra}
            )
        if which is None or which == "exact":
            cut = len(first) // 2
            behind = model, ExactPrefix(prefix_kv(model, first[:cut])), cut
            own = first[cut:]
        else:
            behind = model, MemoryPrefix(stored[which].memory.layers), len(stored[which].prefix)
        wanted.append([*expected(*behind, [own, second]), expected(*behind, [own, other])[1]])
    engine = {**ENGINE, "tp_size": ranks}
    out = run_engine(tmp_path, engine, rounds, env | ranks_on_a_cpu(ranks), environment)
    found = [list(turns) for turns in zip(*said(out), strict=True)]
    assert found[:-1] == wanted[:-1]
    assert found[-1][0] == wanted[-1][0]
    memories = out["state"]["memories"]
    assert len(memories["loaded"]) == 2
    assert 0 < memories["fell_back"] < memories["lookups"]
    assert memories["opted_out"] == len(rounds)
    assert [one["cached_tokens"] for one in out["rounds"][0]][:2] == [500, 150]
    assert (retractions(out) > 0) == bool(environment)


class SessionBehind(AdaptiveSession):
    """A session whose heads compete for entries, behind a prefix of so many tokens."""

    def __init__(self, prefix: Prefix, length: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_tokens = self.turn_start = self.length = length
        self.prefix = prefix
        self.found: AttentionState | None = None
        heads = range(len(self._by_head[0]))
        self._by_head = [[CacheBehind((head,), self) for head in heads] for _ in self._by_head]

    def _attend_layer(self, layer, q, k, v, scale):
        positions = torch.arange(self.num_tokens - q.shape[2], self.num_tokens)
        rotation = rotation_of(self.model, layer, positions)
        asked = Asked(q[0].unflatten(0, (k.shape[1], -1)), rotation, positions - self.length, scale)
        self.found = self.prefix.state(layer, asked)
        return super()._attend_layer(layer, q, k, v, scale)


class CacheBehind(ClassCache):
    """A head of theirs."""

    def __init__(self, heads: tuple[int, ...], session: SessionBehind) -> None:
        super().__init__(heads)
        self.session = session

    def attend_state(self, q, k, v, scale):
        state, found, mine = super().attend_state(q, k, v, scale), self.session.found, self.heads
        return state.merge(AttentionState(found.out[list(mine)], found.lse[list(mine)]))


def test_heads_compete_behind_a_memory(tmp_path, model, stored, env):
    """The tokens are the reference's: turns that are compressed, in a batch with a session that has
    no memory."""
    worth = fit_tokens(str(DEMO_MODEL), contexts=3, lengths=[512]).worth
    worth.save(tmp_path / "worth.npz")
    share, rng = FixedShare(0.3), random.Random(9)
    rounds, wanted = [[], [], []], []
    for index, which in enumerate((0, 1, None)):
        turns = [tokens(rng, count) for count in (700 - 100 * index, 130, 3)]
        scored = model, RULE, 32, Reconstruction.of(worth)
        if which is None:
            session, before = AdaptiveSession(*scored), []
        else:
            memory, before = MemoryPrefix(stored[which].memory.layers), stored[which].prefix
            session = SessionBehind(memory, len(before), *scored)
        session.keep_count = lambda prompt, span: share.choose(Turn(prompt, span)).kept_tokens
        wanted.append([session.turn(prompt, NEW).token_ids for prompt in turns])
        for turn, prompt in enumerate(turns):
            request = {"input_ids": prompt if turn else [*before, *prompt], "max_new_tokens": NEW}
            rounds[turn].append(request | ({"continues": [turn - 1, index]} if turn else {}))
    del env["KVTIER_HEAD_PROFILE"]
    out = run_engine(
        tmp_path,
        ENGINE,
        rounds,
        env
        | {
            "KVTIER_SCORER": "reconstruction",
            "KVTIER_SCORER_FILE": str(tmp_path / "worth.npz"),
            "KVTIER_HEAD_BUDGETS": "adaptive",
            "KVTIER_RETENTION": "0.3",
        },
    )
    assert [list(turns) for turns in zip(*said(out), strict=True)] == wanted
    assert out["state"]["memories"]["lookups"] > 0
    assert out["state"]["compacted_tokens"] > 700


def test_a_session_in_fp8_behind_a_memory_in_the_models_dtype(tmp_path, model, stored, env):
    rng = random.Random(8)
    turns = [[tokens(rng, 60), tokens(rng, 25)], [tokens(rng, 110), tokens(rng, 3)]]
    first = [
        {"input_ids": [*one.prefix, *own[0]], "max_new_tokens": NEW}
        for one, own in zip(stored, turns, strict=True)
    ]
    second = [
        {"input_ids": own[1], "max_new_tokens": NEW, "continues": [0, index]}
        for index, own in enumerate(turns)
    ]
    del env["KVTIER_HEAD_PROFILE"]
    fp8 = {**ENGINE, "kv_cache_dtype": "fp8_e4m3"}
    out = run_engine(tmp_path, fp8, [first, second], env)
    wanted = [
        expected(model, MemoryPrefix(one.memory.layers), len(one.prefix), own, torch.float8_e4m3fn)
        for one, own in zip(stored, turns, strict=True)
    ]
    assert [list(turns) for turns in zip(*said(out), strict=True)] == wanted


def test_nothing_leaks_in_a_life_of_forks_aborts_evictions_and_new_beginnings(
    tmp_path, stored, env
):
    """Pools that hold a fraction of what is asked for, and a card that sends some requests to the
    exact prefix. SGLang's checks end a server that loses a slot."""
    for one, above in zip(stored, (0.2, 1.0), strict=True):
        card = one.memory.card.model_copy(update={"requeue_above": above})
        save(tmp_path / "memories" / one.folder.name, card, one.prefix, one.memory.layers)
    operations = 160
    plan = {
        "engine": {**ENGINE, "max_total_tokens": 3000, "chunked_prefill_size": 256},
        "operations": operations,
        "seed": 3,
        "prefixes": [one.prefix for one in stored],
    }
    out = run_script(
        FUZZER,
        tmp_path,
        plan,
        {
            **env,
            "KVTIER_MEMORY": str(tmp_path / "memories"),
            "KVTIER_RETENTION": "0.5",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        },
    )
    assert out["finished"] > 0.1 * operations
    assert out["state"]["integrity"] == []
    memories = out["state"]["memories"]
    assert memories["lookups"] > 0
    assert memories["requeued"] > 0
    assert out["after_flush"]["slots_used"] == 0


def test_memories_come_and_go_while_a_server_runs(tmp_path, model, stored, env):
    """The server serves what is in the folder when it is read again, and nothing else; a directory
    that cannot be served changes nothing. A request that a memory's entries do not know is answered
    from the exact prefix, and nothing is sent before: the last memory's card allows no lookup to
    fall back. After an update of the weights, even to the same ones, every prefix is computed."""
    served, away = tmp_path / "served", tmp_path / "away"
    for folder, one in ((served, stored[0]), (away, stored[1])):
        save(folder / one.folder.name, one.memory.card, one.prefix, one.memory.layers)
    forbidden = stored[1].memory.card.model_copy(update={"refusals": ["it is bad"]})
    save(away / "bad", forbidden, stored[1].prefix, stored[1].memory.layers)
    strict = stored[0].memory.card.model_copy(update={"requeue_above": 0.0})
    save(away / "strict", strict, stored[0].prefix, stored[0].memory.layers)
    rng = random.Random(7)
    own = [tokens(rng, 20), tokens(rng, 30)]
    unknown = [tokens(rng, count) for count in (30, 80, 130)]
    both = [
        {"input_ids": [*one.prefix, *ids], "max_new_tokens": NEW}
        for one, ids in zip(stored, own, strict=True)
    ]
    moves = [
        {"memories": [str(away / "bad"), str(served / "bad")]},
        {"memories": [str(served / "bad"), str(away / "bad")]},
        {"memories": [str(away / "short"), str(served / "short")]},
        {"memories": [str(served / "long"), str(away / "long")]},
        {"memories": [str(away / "strict"), str(served / "strict")]},
    ]
    requeued = [
        {"input_ids": [*stored[0].prefix, *ids], "max_new_tokens": NEW, "stream": streams}
        for ids, streams in zip(unknown, (True, False, True), strict=True)
    ]
    rounds = [both, moves[0], both, moves[1], moves[2], both, moves[3], both]
    # A server keeps the card of a memory that was away until it is flushed.
    rounds += [{"flush": True}, moves[4], requeued, {"weights": str(DEMO_MODEL)}, both]
    # Nothing is dropped, so that asking twice says the same.
    del env["KVTIER_HEAD_PROFILE"]
    out = run_engine(tmp_path, ENGINE, rounds, env | {"KVTIER_MEMORY": str(served)})
    assert [out["rounds"][at] for at in (1, 3, 4, 6, 9)] == [[False], *[[True]] * 4]
    behind, exact = [], []
    for one, ids in zip(stored, own, strict=True):
        length = len(one.prefix)
        memory, kv = MemoryPrefix(one.memory.layers), prefix_kv(model, one.prefix)
        behind.append(expected(model, memory, length, [ids])[0])
        exact.append(expected(model, ExactPrefix(kv), length, [ids])[0])
    assert behind[0] != exact[0]
    assert behind[1] != exact[1]
    found = [
        [request["output_ids"] for request in out["rounds"][at]] for at in (0, 2, 5, 7, 10, 12)
    ]  # fmt: skip
    assert found[0] == found[1] == [behind[0], exact[1]]
    assert found[2] == behind
    assert found[3] == [exact[0], behind[1]]
    kv = prefix_kv(model, stored[0].prefix)
    assert found[4] == [expected(model, ExactPrefix(kv), 500, [ids])[0] for ids in unknown]
    assert out["state"]["memories"]["requeued"] == 3
    parts = [*range(1, NEW + 1)]
    assert [one["parts"] for one in out["rounds"][10]] == [parts, None, parts]
    assert found[5] == exact
    assert [one["cached_tokens"] for one in out["rounds"][12]] == [0, 0]
    assert out["state"]["integrity"] == []
    assert out["state"]["memories"]["loaded"] == []
