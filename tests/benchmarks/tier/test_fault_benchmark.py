"""The fault benchmark: its load, its faults against a real service, and what it makes of both."""

from __future__ import annotations

import itertools
import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("grpc")

from thorough import THOROUGH
from tierd.live_tier import blob_of, fetch, key_of, payload_of
from waiting import SAFETY_S, FakeClock, wait_for

from benchmarks.tier.faults import __main__ as tier_faults
from benchmarks.tier.faults.kinds import KINDS, Where
from benchmarks.tier.faults.load import TURNS, Asked, Book, make_sessions, requests
from benchmarks.tier.faults.processes import free_address
from benchmarks.tier.faults.report import (
    KindOutcome,
    Outcome,
    Throughput,
    differing,
    make_bars,
    make_table,
)
from kvtier.errors import TierError, TierUnavailableError
from kvtier.tier.client import Landing, TierClient

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, mounts a tmpfs")

THROUGHPUT = Throughput(
    lot_requests=4, none_s=((1, 1), (2, 4), (3, 3)), down_s=((1, 1), (4, 2), (4, 4)), failed=0,
    wrong=0,
    answers=8, answers_that_differ_between_passes=0,
)  # fmt: skip


def kind_outcome(**changes) -> KindOutcome:
    right = {
        "name": "kill -9", "event": "", "served": "", "events": 10, "details": {}, "during_s": 1.0,
        "requests": 5, "requests_per_s": 5.0, "failed": 0, "wrong": 0, "restored": 1,
        "operations_hit": 2, "refused": 0, "opened": 1, "loading_paid": True,
        "closed_s": 0.5, "used_s": 2.0, "examples": (),
    }  # fmt: skip
    return KindOutcome(**right | changes)


def test_every_visit_has_a_salt_of_its_own_and_its_turns_come_in_order() -> None:
    seen = list(itertools.islice(requests(3, visits=5, seed=1, name="a"), 2 * 5 * TURNS))
    assert seen == list(itertools.islice(requests(3, visits=5, seed=1, name="a"), len(seen)))
    visits: dict[str, list[Asked]] = {}
    for asked in seen:
        visits.setdefault(asked.salt, []).append(asked)
    assert len(visits) == 10
    for turns in visits.values():
        assert [one.turn for one in turns] == list(range(TURNS))
        assert len({one.session for one in turns}) == 1


def test_a_prompt_is_all_that_was_said_before_and_the_question() -> None:
    (session,) = make_sessions(1, seed=3)
    book = Book([session], [[[7], [8, 2]]])
    ids = book.prompt(Asked(0, 2, ""))
    assert ids == [
        *session.context_ids, *session.prompts[0], 7, 2, *session.prompts[1], 8, 2,
        *session.prompts[2],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "unmet"),
    [
        ({}, []),
        ({"events": 9}, ["faults of each kind"]),
        ({"failed": 1}, ["failed requests"]),
        ({"wrong": 1}, ["turns with wrong tokens"]),
        ({"closed_s": 16.0}, ["breaker closed by itself after every kind"]),
        ({"used_s": None}, ["puts and restores again after every kind"]),
    ],
)
def test_every_bar_can_be_missed(changes, unmet) -> None:
    kinds = (kind_outcome(), kind_outcome(**changes))
    outcome = Outcome(throughput=THROUGHPUT, kinds=kinds, integrity=(), slowest_request_s=1.0)
    bars = make_bars(outcome, faults=10)
    assert [bar.name for bar in bars if not bar.met] == unmet
    assert make_table(outcome).row_count == 2


def test_throughput_is_the_median_of_lots_over_both_engines_of_an_arm() -> None:
    assert (THROUGHPUT.ratio, THROUGHPUT.alike) == (1.0, 1.0)
    slow = THROUGHPUT.model_copy(update={"down_s": ((1.1, 1.1), (3.3, 3.3), (1, 1))})
    outcome = Outcome(
        throughput=slow, kinds=(), integrity=("a slot has no owner",), slowest_request_s=1.0
    )
    assert [bar.met for bar in make_bars(outcome, faults=0)][-2:] == [False, False]


def test_answers_of_two_passes_are_compared_turn_by_turn() -> None:
    assert differing([[[1], [2]], [[3]]], [[[1], [9]], [[3]]]) == 1


class Counting:
    """An engine that takes as many seconds as there were lots before, and one."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def tell(self, do: str, seed: int = 0) -> dict:
        self.said.append(f"{do} {seed}")
        return {"seconds": self.said.count("lot 0"), "failed": 0}


def test_engines_take_turns_on_the_same_requests(monkeypatch) -> None:
    monkeypatch.setattr(tier_faults, "ROUND_LOTS", 2)
    said: list[str] = []
    found = tier_faults.in_turns([Counting(said) for _ in range(3)], rounds=2, seed=5)
    assert said == [*["begin 5"] * 3, *["lot 0"] * 6, *["begin 6"] * 3, *["lot 0"] * 6]
    assert [[one["seconds"] for one in engines] for engines in found] == [
        [1, 2, 3], [6, 5, 4], [7, 8, 9], [12, 11, 10],
    ]  # fmt: skip


class Telling:
    """An engine whose tier says one thing after the other."""

    def __init__(self, *tiers: dict) -> None:
        self.tiers = list(tiers)

    def tell(self, do: str) -> dict:
        return {"tier": self.tiers.pop(0) if len(self.tiers) > 1 else self.tiers[0]}


def test_a_tier_is_in_use_when_something_was_put_and_restored_after_the_breaker_closed(
    monkeypatch,
) -> None:
    monkeypatch.setattr(tier_faults, "time", FakeClock())
    monkeypatch.setattr(tier_faults, "LOOK_S", 1.0)
    monkeypatch.setattr(tier_faults, "RECOVERY_S", 50.0)
    closed = {"healthy": True, "put": 5, "restored_requests": 5}
    opened, both = closed | {"healthy": False}, closed | {"put": 6, "restored_requests": 6}
    found = tier_faults.wait_for_use(Telling(opened, opened, closed, closed, both))
    assert (found["closed_s"], found["used_s"]) == (2.0, 4.0)
    found = tier_faults.wait_for_use(Telling(opened, closed, closed | {"put": 6}))
    assert (found["closed_s"] is None, found["used_s"]) == (False, None)
    assert tier_faults.wait_for_use(Telling(opened, closed, opened))["closed_s"] is None


@pytest.fixture
def where(tmp_path: Path) -> Where:
    return Where(free_address(), tmp_path, lambda: 0, lambda: True, deadline_s=0.05, seed=1)


def put(client: TierClient, number: int) -> None:
    """However often that takes."""

    def stored() -> bool:
        try:
            client.connect()
            client.put(blob_of(number), replace=True)
        except TierError:
            return False
        return True

    wait_for(stored)


def answered(call):
    """Return what a call says. gRPC itself now and then says INTERNAL of one that is answered
    early."""
    for _ in range(3):
        with suppress(TierUnavailableError):
            return call()
    return call()


def test_flipped_bits_reach_the_client_and_what_it_counts_is_what_is_corrupt(where) -> None:
    kind = KINDS["bit-flip"](where)
    with kind.running(), TierClient(where.address, timeout_s=SAFETY_S, shared=False) as client:
        keys = [key_of(number) for number in range(20)]
        for number in range(20):
            put(client, number)
        # Answered before all of it was sent, which a proxy has to live with.
        assert answered(lambda: client.put(blob_of(1, 5 << 20))) is False
        assert fetch(client, keys)[0] == [Landing.LANDED] * 20
        kind.dials[kind.dial] = 1
        corrupt = 0
        for _ in range(20):
            outcome, landed = fetch(client, keys)
            corrupt += outcome.count(Landing.CORRUPT)
            assert all(data == payload_of(position) for position, data in landed.items())
        kind.dials[kind.dial] = 0
        assert corrupt == kind.count() > 0
        assert min(kind.details.values()) > 0
        assert fetch(client, keys)[0] == [Landing.LANDED] * 20


def test_slow_calls_are_answered_and_counted(where) -> None:
    kind = KINDS["slow"](where)
    with kind.running(), TierClient(where.address, timeout_s=SAFETY_S, shared=False) as client:
        put(client, 1)
        assert kind.count() == 0
        kind.dials[kind.dial] = 1
        client.exists([key_of(1)])
        assert kind.count() == 1
        assert kind.details == {"answered_late": 1, "cut_off": 0}
        kind.dials[kind.dial] = 0
        client.exists([key_of(1)])
        assert kind.count() == 1


@pytest.mark.parametrize("name", ["kill", "stop"])
def test_a_service_that_was_killed_or_stopped_is_back(where, name, memory_directory) -> None:
    kind = KINDS[name](where)
    with kind.running(), TierClient(where.address, timeout_s=1.0) as client:
        put(client, 1)
        kind.inject(4)
        assert kind.events == 4
        put(client, 2)


@pytest.fixture
def memory_directory(tmp_path, monkeypatch):
    """Have the memory in a directory other than /dev/shm, which others may be watching."""
    from benchmarks.tier.faults import kinds as tier_faults_kinds

    monkeypatch.setattr(tier_faults_kinds, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_a_reset_connection_is_one_that_carried_something(where) -> None:
    kind = KINDS["reset"](where)
    with kind.running(), TierClient(where.address, timeout_s=SAFETY_S, shared=False) as client:
        put(client, 1)
        kind._proxy.active = True
        failed = 0
        for number in itertools.count():
            if kind._proxy.resets >= 3:
                break
            try:
                client.put(blob_of(number, 300_000), replace=True)
            except TierError:
                failed += 1
        assert failed >= 3
        kind._proxy.active = False
        put(client, 1)


def test_bad_input_is_refused_by_name(capsys) -> None:
    assert tier_faults.main(["--faults", "0"]) == 2
    assert "--faults" in capsys.readouterr().err


@pytest.mark.engine
def test_a_small_run_fails_no_request_and_says_no_wrong_token(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    kinds = ["bit-flip", "reset"] if THOROUGH else ["bit-flip"]
    flags = ["--faults", "2", "--kinds", *kinds, "--sessions", "2", "--rounds", "0"]
    # Loading may be slower than computing on a busy machine, and then the tier would not be asked.
    flags += ["--tier-patience-s", "30"]
    tier_faults.main([*flags, "--out", str(out)])
    document = json.loads(out.read_text())
    met = {bar["bar"]: bar["met"] for bar in document["bars"]}
    assert met["faults of each kind"]
    assert met["failed requests"]
    assert met["turns with wrong tokens"]
    assert met["the engine's accounts"]
