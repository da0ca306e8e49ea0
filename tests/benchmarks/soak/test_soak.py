"""The soak: what it compares, what it would notice, and its 5-minute form."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from benchmarks.soak import __main__ as soak
from benchmarks.soak.check import OFF, TIE, Answer, Checker, Reference, compare, teacher_forced
from benchmarks.soak.client import Asked, RequestFailedError, Said, read_answer
from benchmarks.soak.clients import KEPT_WHOLE, MOVED, Client, Engine, Gate, Tally
from benchmarks.soak.load import (
    ACTIONS,
    Load,
    Session,
    choose,
    exact_forks,
    longest_short,
    why_exact,
)
from benchmarks.soak.models import EVERYTHING, FIRST, LOCALITY, SECOND, SPAN_TOKENS
from benchmarks.soak.processes import Served, SoakError
from benchmarks.soak.report import FAULTS, KINDS, growth, make_bars, make_table, memory
from benchmarks.soak.run import Sample, first_of, restarted, until_first_failure
from kvtier.retention.locality import LocalityRule
from kvtier.synthetic.recall import ANSWER_TOKENS, DEFAULT_LANGUAGE

EOT = DEFAULT_LANGUAGE.eot
RULE = LocalityRule(sink_tokens=128, recent_tokens=256, branch_recent_tokens=128)
REFERENCE = Reference(logprobs=(-0.1, -0.2, -0.3), choices=(7, 8, EOT), best=(-0.1, -0.2, -0.3))


def said(**changes) -> Said:
    right = {
        "tokens": (7, 8, EOT), "logprobs": (-0.1, -0.2, -0.3), "prompt_logprobs": (), "cached": 0,
        "restored": 0, "retracted": 0, "version": FIRST,
    }  # fmt: skip
    return Said(**right | changes)


def reference(**changes) -> Reference:
    right = {"logprobs": REFERENCE.logprobs, "choices": REFERENCE.choices, "best": REFERENCE.best}
    return Reference(**right | changes)


# -- comparing --


def test_an_answer_that_is_the_references_is_right() -> None:
    verdict = compare(said(), REFERENCE)
    assert (verdict.right, verdict.ties, verdict.off) == (True, 0, 0.0)


def test_a_wrong_token_is_noticed_where_it_is() -> None:
    found = compare(said(tokens=(7, 9, EOT)), reference(best=(-0.1, -0.2 + 2 * TIE, -0.3)))
    assert (found.wrong, found.right) == (1, False)


def test_a_token_that_the_reference_likes_as_much_is_a_tie() -> None:
    found = compare(said(tokens=(7, 9, EOT)), reference(best=(-0.1, -0.2 + TIE / 2, -0.3)))
    assert (found.wrong, found.ties, found.right) == (None, 1, True)


@pytest.mark.parametrize("logprob", [-0.2 - 2 * OFF, -0.2 + 2 * OFF, math.nan, -math.inf])
def test_a_log_probability_that_is_not_the_references_is_noticed(logprob) -> None:
    found = compare(said(logprobs=(-0.1, logprob, -0.3)), REFERENCE)
    assert found.wrong is None
    assert not found.right


def test_so_is_one_of_the_prompt() -> None:
    measured = said(prompt_logprobs=(-1.0, -2.0))
    assert compare(measured, reference(prompt_logprobs=(-1.0, -2.0))).right
    assert not compare(measured, reference(prompt_logprobs=(-1.0, -2.5))).right


def test_a_reference_of_another_answer_compares_with_nothing() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare(said(tokens=(7, EOT), logprobs=(-0.1, -0.3)), REFERENCE)
    with pytest.raises(ValueError, match="zip"):
        compare(said(prompt_logprobs=(-1.0,)), REFERENCE)


# -- answers --


def answer(tokens=(7, EOT), kind="stop", versions=(FIRST,), **meta) -> dict:
    right = {
        "finish_reason": {"type": kind}, "weight_version": versions[-1],
        "weight_versions": [{"version": one} for one in versions],
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "cached_tokens": 3, "num_retractions": 0,
        "cached_tokens_details": {"device": 1, "host": 0, "storage": 2},
    }  # fmt: skip
    return {"output_ids": list(tokens), "meta_info": right | meta}


ASKED = Asked("rid", (1, 2, 3))


def test_a_whole_answer_is_read() -> None:
    found = read_answer(ASKED, answer())
    assert found == said(tokens=(7, EOT), logprobs=(-0.5, -0.5), cached=3, restored=2)
    read_answer(ASKED, answer(tokens=(7,) * ANSWER_TOKENS, kind="length"))


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {"error": {"message": "no"}},
        answer(kind="abort"),
        answer(tokens=(7, 8), kind="stop"),
        answer(tokens=(7, 8), kind="length"),
        answer(output_token_logprobs=[[-0.5, 7, None]]),
        answer(versions=(FIRST, SECOND)),
    ],
)
def test_anything_less_is_a_failed_request(broken) -> None:
    with pytest.raises(RequestFailedError):
        read_answer(ASKED, broken)


def test_prompt_logprobs_must_be_there_if_asked_for() -> None:
    asked = Asked("rid", (1, 2, 3), prompt_logprobs=True)
    found = read_answer(asked, answer(input_token_logprobs=[[None, 1], [-1.0, 2], [-2.0, 3]]))
    assert found.prompt_logprobs == (-1.0, -2.0)
    with pytest.raises(RequestFailedError):
        read_answer(asked, answer())


# -- the clients, against servers that lie --


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
        """As the reference: token 7 is right."""
        ids = body["input_ids"]
        first = body["logprob_start_len"]
        given = [[None, ids[first]], *([-1.0, one] for one in ids[first + 1 : -2])]
        given += [[-0.1 if ids[-2] == 7 else -5.0, ids[-2]], [-0.1, EOT]]
        tops = [None, *([[-0.1, one]] for one in (*ids[first + 1 : -2], 7, EOT))]
        meta = {"input_token_logprobs": given, "input_top_logprobs": tops}
        return {"meta_info": meta | {"weight_version": self.version}}


TOLD = ["turn", "fork", "prompt logprobs", "scopes", "exact forks", "move"]


def served(fake: Fake, action: str, turns: int = 5) -> tuple[Tally, Checker]:
    """What becomes of one client's turns."""

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
def test_right_answers_are_counted_as_such(action) -> None:
    tally, checker = served(Fake(), action)
    kind = checker.kinds[KEPT_WHOLE]
    assert tally.finished == kind.compared >= 5
    assert (kind.wrong_tokens, kind.wrong_logprobs, tally.failed) == (0, 0, 0)


@pytest.mark.parametrize("action", TOLD)
def test_an_engine_that_says_a_wrong_token_is_found_out(action) -> None:
    tally, checker = served(Fake(token=8), action)
    assert checker.kinds[KEPT_WHOLE].wrong_tokens == tally.finished >= 5
    assert "reference [7" in checker.examples[0]


@pytest.mark.parametrize("action", TOLD)
def test_an_engine_that_fails_is_found_out(action) -> None:
    tally, checker = served(Fake(fails=True), action)
    assert tally.failed == tally.asked >= 5
    assert (tally.finished, checker.kinds) == (0, {})


def test_what_another_rule_stored_is_told_from_what_an_engines_own_rule_did() -> None:
    """Only the first answer of an engine in a scope, and only if something was restored for it."""

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


def test_the_reference_is_asked_with_the_adapter_and_in_no_scope() -> None:
    scope = {"lora_path": "tenant", "extra_key": "x", "cache_salt": "y"}
    body = teacher_forced(Asked("rid", (1, 2, 3), scope), said())
    assert body["lora_path"] == "tenant"
    assert not {"extra_key", "cache_salt"} & set(body)
    assert body["input_ids"] == [1, 2, 3, 7, 8, EOT]
    assert body["logprob_start_len"] == 2


def test_a_session_stays_at_home_most_of_the_time_and_moves_when_home_is_closed() -> None:
    async def run() -> tuple[Counter, set]:
        engines = [Engine(name, Fake(), EVERYTHING) for name in "AB"]
        checker = Checker(Fake(), {FIRST: Path()}, FIRST)
        client = Client(1, Load(1, "adapter"), engines, checker, Tally(), RULE)
        session = Session(client.load.own_text(), {}, home=1)
        usual = Counter(client._engine(session).name for _ in range(400))
        async with engines[1].gate.closed():
            return usual, {client._engine(session).name for _ in range(50)}

    usual, closed = asyncio.run(run())
    assert 250 < usual["B"] < 380
    assert closed == {"A"}


# -- what has to be exact --


def test_why_an_answer_of_a_compressing_engine_has_to_be_exact() -> None:
    def why(length: int, *, short: bool = False, measured: bool = False, **changes):
        return why_exact(RULE, range(length), said(**changes), short=short, measured=measured)

    assert why(2000, cached=0) == "computed whole"
    assert why(2000, cached=257) == "computed whole"
    assert why(2000, cached=258) is None
    assert why(2000, cached=0, retracted=1) is None
    assert why(2000, cached=1999, measured=True) == "prompt logprobs"
    assert why(385, cached=380, short=True) == "short"
    assert why(200, cached=190, short=True) == "short"
    assert why(386, cached=380, short=True) is None
    assert why(385, cached=380) is None


def test_short_texts_stay_within_what_locality_heads_keep() -> None:
    assert longest_short() <= RULE.sink_tokens + RULE.recent_tokens + 1
    assert RULE.dropped(0, longest_short(), longest_short()).num_tokens == 0


def test_some_turns_of_long_texts_bring_spans_along_and_those_of_short_ones_do_not() -> None:
    texts = Load(3, "").texts
    added = [
        [len(turn) - len(question) for turn, question in zip(one.turns, one.questions, strict=True)]
        for one in texts
    ]
    assert all(more[0] == 0 for more in added)
    assert not any(any(more) for more, one in zip(added, texts, strict=True) if one.short)
    long = [more for one in added for more in one if more]
    assert len(long) > 5
    assert min(long) > SPAN_TOKENS


def test_no_exact_fork_shares_what_the_turn_or_a_fork_before_it_kept_compressed() -> None:
    text = next(text for text in Load(3, "").texts if len(text.context) > 1300)
    forks = exact_forks(text, RULE)
    assert len(forks) >= 3
    before = [len(text.context) + len(text.questions[0])]
    for prompt in forks:
        shared = next(
            (i for i, (a, b) in enumerate(zip(prompt, text.context, strict=False)) if a != b),
            len(text.context),
        )
        assert shared > RULE.sink_tokens + RULE.recent_tokens
        for prompt_stop in before:
            span = RULE.dropped(0, prompt_stop, prompt_stop)
            assert span.num_tokens
            assert not RULE.can_split(span, shared)
        before.append(shared)


def test_actions_are_the_seeds_and_all_of_them_come() -> None:
    def drawn(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [choose(rng) for _ in range(500)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert set(Counter(drawn(1))) == set(ACTIONS)


# -- memory, gates, processes --


def samples(name: str, values, start: int = 1) -> list[Sample]:
    return [Sample(float(i), name, start, value) for i, value in enumerate(values)]


def test_memory_that_grows_all_the_time_shows_and_filling_up_does_not() -> None:
    assert growth(samples("a", [100 + i for i in range(100)])) == pytest.approx(0.366, abs=0.01)
    assert growth(samples("a", [min(i, 10) * 10 for i in range(100)])) == 0.0
    assert growth(samples("a", range(1, 9))) is None


def test_memory_is_that_of_the_longest_lived_start() -> None:
    seen = [*samples("a", [5] * 20), *samples("a", [9] * 40, start=2), *samples("b", [1] * 5)]
    found = memory(seen, load_s=50.0)
    assert (found["a"]["start"], found["a"]["resident_bytes"]) == (2, 9)
    assert found["a"]["growth"] == 0.0
    assert found["b"]["growth"] is None


def test_a_closed_gate_has_no_client_inside_and_lets_none_in() -> None:
    async def run() -> list[str]:
        gate, said_so = Gate(), []

        async def visit(name: str) -> None:
            async with gate.entered():
                said_so.append(f"{name} in")
                await asyncio.sleep(0.01)
                said_so.append(f"{name} out")

        async def close() -> None:
            async with gate.closed():
                assert not gate.is_open
                said_so.append("closed")
                later = asyncio.create_task(visit("second"))
                await asyncio.sleep(0.02)
                said_so.append("open")
            await later

        first = asyncio.create_task(visit("first"))
        await asyncio.sleep(0)
        await close()
        await first
        return said_so

    expected = ["first in", "first out", "closed", "open", "second in", "second out"]
    assert asyncio.run(run()) == expected


def test_memory_is_that_of_a_process_and_its_children(tmp_path) -> None:
    own = "import time; block = bytearray(50 << 20); print(flush=True); time.sleep(600)"
    code = f"""
import subprocess, sys, pathlib
child = subprocess.Popen([sys.executable, "-c", {own!r}], stdout=subprocess.PIPE)
child.stdout.readline()
pathlib.Path({str(tmp_path / "ready")!r}).touch()
child.wait()
"""
    parent = process(tmp_path, code)
    parent.ready = (tmp_path / "ready").exists
    parent.start()
    try:
        assert parent.resident_bytes() > 50 << 20
    finally:
        parent.kill()


def process(folder: Path, code: str) -> Served:
    return Served("child", [sys.executable, "-c", code], folder, lambda: True)


def test_a_process_that_ends_by_itself_is_told_with_its_last_words(tmp_path) -> None:
    child = process(tmp_path, "import sys; sys.exit('no more of this')")
    child.start()
    assert child._process is not None
    child._process.wait()
    with pytest.raises(SoakError, match=r"(?s)child ended by itself .*no more of this"):
        child.check()
    assert child.resident_bytes() is None


def test_a_process_that_was_killed_has_not_ended_by_itself(tmp_path) -> None:
    child = process(tmp_path, "import time; time.sleep(600)")
    child.launch()
    try:
        assert child.resident_bytes() is None, "it does not answer yet"
        child.wait_ready()
        assert child.resident_bytes() > 0
        child.check()
    finally:
        child.kill()
    child.check()


def test_whatever_fails_first_ends_the_soak() -> None:
    async def fail() -> None:
        raise SoakError("gone")

    async def sleep() -> None:
        await asyncio.sleep(60)

    with pytest.raises(SoakError, match="gone"):
        asyncio.run(until_first_failure(sleep(), [sleep(), fail()]))


def test_what_failed_first_is_told_without_the_groups_around_it() -> None:
    inner = RequestFailedError("/flush_cache: 400")
    assert first_of(ExceptionGroup("a", [ExceptionGroup("b", [inner])])) is inner
    assert first_of(inner) is inner


def test_a_restarted_engine_listens_where_it_did() -> None:
    where = ["--host", "127.0.0.1", "--port", "1"]
    command = ["python", "-m", "kvtier", "serve", "--model", "m", "--old", "1", *where]
    found = restarted(command, ["--model", "m"], ["--new", "2"])
    assert found == ["python", "-m", "kvtier", "serve", "--model", "m", "--new", "2", *where]


# -- the bars --


TIER = {"used_bytes": 1, "capacity_bytes": 2, "blobs": 1, "evictions": 0, "quarantined": 0}
EACH = "compared, of each kind"
RESTORED = "requests restored from the tier"


def life(**changes) -> dict:
    return {"engine": "A", "rule": LOCALITY, "restored_requests": 1, "integrity": []} | changes


def outcome(**changes) -> dict:
    kind = {"compared": 5, "restored": 1, "tokens": 50, "ties": 0, "wrong_tokens": 0,
            "wrong_logprobs": 0, "largest_off": 1e-5}  # fmt: skip
    right = {
        "load_s": 60.0,
        "requests": {"asked": 10, "finished": 10, "failed": 0, "given_up": 1},
        "answers": dict.fromkeys(KINDS, 5),
        "compared": {name: dict(kind) for name in KINDS},
        "compared_by_weights": {FIRST: 3, SECOND: 2},
        "compressed_shown": kind,
        "faults": dict.fromkeys(FAULTS, 1),
        "problems": [],
        "tier": TIER,
        "memory": {name: {"growth": 0.01} for name in ("engine-a", "engine-b", "tier")},
        "engines": [life(), life(engine="B")],
        "recall": {"exact": {"recall": 1.0, "questions": 3}},
    }
    return right | changes


def compared(**changes) -> dict:
    found = outcome()["compared"]
    found["short"] |= changes
    return found


@pytest.mark.parametrize(
    ("changes", "unmet"),
    [
        ({}, []),
        ({"compared": compared(wrong_tokens=1)}, ["answers with a wrong token"]),
        ({"compared": compared(wrong_logprobs=1)}, ["answers with a wrong log-probability"]),
        ({"compared": compared(compared=0)}, [EACH]),
        ({"compared": {kind: one for kind, one in compared().items() if kind != MOVED}}, [EACH]),
        ({"requests": {"finished": 9, "failed": 1}}, ["failed requests"]),
        ({"requests": {"finished": 0, "failed": 0}}, ["failed requests"]),
        ({"compared_by_weights": {FIRST: 5}}, ["under both weights"]),
        ({"faults": dict.fromkeys(FAULTS[1:], 1)}, ["faults, of each kind"]),
        ({"engines": [life(), life(engine="B", restored_requests=0)]}, [RESTORED]),
        ({"engines": [life()]}, [RESTORED]),
        ({"engines": [life(), life(engine="B", integrity=["a slot has no owner"])]}, ["accounts"]),
        ({"problems": ["a slot has no owner"]}, ["accounts"]),
        ({"tier": TIER | {"used_bytes": 3}}, ["accounts"]),
        ({"memory": {"engine-a": {"growth": 0.0}}}, ["memory's growth"]),
        (
            {"memory": outcome()["memory"] | {"tier": {"growth": 0.2}}},
            ["memory's growth"],
        ),
    ],
)  # fmt: skip
def test_every_bar_can_be_missed(changes, unmet) -> None:
    bars = make_bars(outcome(**changes), most_growth=0.1)
    assert [bar.name for bar in bars if not bar.met] == unmet
    assert make_table(outcome(**changes)).row_count == len(KINDS) + 1


def test_rules_that_share_no_kv_need_not_have_shared_any() -> None:
    found = {kind: one for kind, one in compared().items() if kind != MOVED}
    lives = [life(rule=EVERYTHING), life(engine="B", rule="quality target")]
    bars = make_bars(outcome(compared=found, engines=lives), most_growth=0.1)
    assert all(bar.met for bar in bars)


def test_bad_input_is_refused_by_name(capsys) -> None:
    assert soak.main(["--minutes", "0"]) == 2
    assert "--minutes" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.slow
def test_a_few_minutes_serve_nothing_wrong_and_fail_no_request(tmp_path: Path, capsys) -> None:
    """Five minutes with its start; memory, which fills up for longer, must not double."""
    out = tmp_path / "soak.json"
    code = soak.main(["--minutes", "3.5", "--most-growth", "1.0", "--out", str(out)])
    told = "".join(capsys.readouterr())
    assert out.exists(), told
    document = json.loads(out.read_text())
    assert [bar for bar in document["bars"] if not bar["met"]] == [], told
    assert code == 0
    assert document["outcome"]["requests"]["finished"] > 100
