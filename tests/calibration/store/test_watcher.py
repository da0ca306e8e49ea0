"""The watcher: always an answer at once, the last good one whatever happens to the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise

import pytest
from calibration_samples import DTYPE, MODEL, POLICY, REVISION, curve_document
from redis_server import RedisServer, redis_server
from waiting import SAFETY_S, wait_for

from kvtier.calibration.store.directory import LocalCopy
from kvtier.calibration.store.redis import RedisStore
from kvtier.calibration.store.watcher import REASONS, CalibrationWatcher, Served, watch
from kvtier.config import load_settings

SERVED = Served(MODEL, REVISION, POLICY, DTYPE)
POLL_S = 0.02


class Bench:
    """A server of its own, a store to write with, and watchers that are closed in the end."""

    def __init__(self, server: RedisServer, directory, stack: ExitStack) -> None:
        self.server, self.local, self._stack = server, LocalCopy(directory), stack
        self.store = self.opened(timeout_s=SAFETY_S)

    def opened(self, url: str | None = None, timeout_s: float = 0.1) -> RedisStore:
        return self._stack.enter_context(
            RedisStore(url or self.server.url, timeout_s=timeout_s, ttl_s=1000)
        )

    def watcher(self, url: str | None = None, timeout_s: float = 0.1) -> CalibrationWatcher:
        store, local = self.opened(url, timeout_s), LocalCopy(self.local.directory)
        watcher = CalibrationWatcher(store, SERVED, local=local, poll_s=POLL_S)
        self._stack.callback(watcher.close)
        assert watcher.wait_first_poll(SAFETY_S)
        return watcher


@pytest.fixture
def bench(tmp_path) -> Iterator[Bench]:
    with redis_server() as server, ExitStack() as stack:
        yield Bench(server, tmp_path / "calibration", stack)


def test_what_is_stored_is_known_after_the_first_poll(bench):
    curve = curve_document()
    bench.store.put(curve)
    watcher = bench.watcher()
    assert watcher.curve() == curve
    assert watcher.counters["changes"] == 1
    assert set(watcher.counters) == set(REASONS)


def test_nothing_stored_is_nothing_known_and_no_failure(bench):
    watcher = bench.watcher()
    assert watcher.curve() is None
    wait_for(lambda: watcher.counters["polls"] > 3)
    assert {name: n for name, n in watcher.counters.items() if n and name != "polls"} == {}


def test_a_changed_curve_is_used_without_a_restart(bench):
    bench.store.put(curve_document())
    watcher = bench.watcher()
    before = watcher.curve()
    changed = curve_document(beta=0.0)
    bench.store.put(changed)
    wait_for(lambda: watcher.curve() == changed)
    assert before.beta == -0.1, "what a caller holds never changes"
    assert watcher.counters["changes"] == 2


def test_a_deleted_curve_is_used_no_more_nor_after_the_store_goes_down(bench):
    bench.store.put(curve_document())
    watcher = bench.watcher()
    bench.store.delete(curve_document().key)
    wait_for(lambda: watcher.curve() is None)
    bench.server.stop()
    wait_for(lambda: watcher.counters["unavailable"] > 0)
    assert watcher.curve() is None


def test_a_store_that_does_not_answer_never_holds_a_reader_up(bench, monkeypatch):
    bench.store.put(curve_document())
    watcher = bench.watcher()
    known, get = watcher.curve(), RedisStore.get
    asked, free = threading.Event(), threading.Event()

    def held(store, key):
        asked.set()
        assert free.wait(SAFETY_S)
        return get(store, key)

    monkeypatch.setattr(RedisStore, "get", held)
    try:
        assert asked.wait(SAFETY_S)
        assert watcher.curve() is known
    finally:
        free.set()


def test_a_store_that_goes_and_comes_is_logged_once_each_time(bench, caplog):
    caplog.set_level(logging.INFO, "kvtier")
    bench.store.put(curve_document())
    watcher = bench.watcher()
    for round_ in (1, 2):
        bench.server.stop()
        wait_for(lambda n=watcher.counters["unavailable"]: watcher.counters["unavailable"] > n + 2)
        assert watcher.curve() is not None
        assert caplog.text.count("store: unavailable") == round_
        bench.server.start()
        bench.store.put(curve_document(r2=round_ / 10))
        wait_for(lambda n=round_: watcher.curve().r2 == n / 10)
        wait_for(lambda n=round_: caplog.text.count("store: works again") == n)


def test_a_store_that_is_down_from_the_start_gives_the_local_copy(bench):
    curve = curve_document()
    bench.local.save(curve)
    bench.server.stop()
    watcher = bench.watcher()
    assert watcher.curve() == curve
    wait_for(lambda: watcher.counters["unavailable"] > 2)
    assert watcher.counters["local_copy"] == 1, "read once, not at every poll"


def test_a_broken_local_copy_is_a_miss_and_logged_once(bench, caplog):
    bench.local.save(curve_document())
    bench.local.path(curve_document().key).write_text('{"half a docu')
    bench.server.stop()
    watcher = bench.watcher()
    wait_for(lambda: watcher.counters["unavailable"] > 2)
    assert watcher.curve() is None
    assert caplog.text.count("is not used") == 1


def test_a_local_copy_of_something_else_is_not_used(bench):
    bench.local.save(curve_document(dtype="bfloat16"))
    bench.server.stop()
    assert bench.watcher().curve() is None


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda document: "no json", "invalid"),
        (lambda document: document.model_copy(update={"dtype": "bfloat16"}).to_json(), "mismatch"),
        (lambda document: document.model_copy(update={"model": "other"}).to_json(), "mismatch"),
    ],
)
def test_a_document_that_may_not_be_used_changes_nothing(bench, caplog, spoil, reason):
    good = curve_document()
    bench.store.put(good)
    watcher = bench.watcher()
    bench.server.admin.set(str(good.key), spoil(good))
    wait_for(lambda: watcher.counters[reason] > 2)
    assert watcher.curve() == good
    assert caplog.text.count(f"curve: {reason}") == 1
    better = curve_document(r2=0.001)
    bench.store.put(better)
    wait_for(lambda: watcher.curve() == better)


def test_a_refusal_is_counted_as_one_and_keeps_the_password(bench, caplog):
    url = bench.server.add_user("ada", "s3cr3t", "+@all", "-get", "~*")
    # There may be an outage in between with a short timeout, and two reports.
    watcher = bench.watcher(url=url, timeout_s=SAFETY_S)
    wait_for(lambda: watcher.counters["refused"] > 1)
    assert caplog.text.count("store: refused") == 1
    assert "s3cr3t" not in caplog.text


def test_a_bug_does_not_end_the_thread(bench, monkeypatch, caplog):
    bench.store.put(curve_document())

    class Broken(RedisStore):
        broken = True

        def get(self, key):
            if self.broken:
                raise ZeroDivisionError("a bug")
            return super().get(key)

    store = Broken(bench.server.url, timeout_s=0.1, ttl_s=1)
    watcher = CalibrationWatcher(store, SERVED, local=bench.local, poll_s=POLL_S)
    try:
        wait_for(lambda: watcher.counters["unexpected"] > 3)
        assert caplog.text.count("ZeroDivisionError: a bug") == 1
        store.broken = False
        wait_for(lambda: watcher.curve() is not None)
    finally:
        watcher.close()


def test_a_listener_that_fails_ends_neither_thread_nor_counting(bench, caplog):
    def full_disk(event: str) -> None:
        raise OSError(event)

    watcher = CalibrationWatcher(
        bench.opened(), SERVED, local=bench.local, poll_s=POLL_S, on_event=full_disk
    )
    try:
        wait_for(lambda: watcher.counters["polls"] >= 3)
    finally:
        watcher.close()
    assert caplog.text.count("the listener to calibration events failed") == 1


def test_a_store_that_is_down_is_asked_less_and_less(bench):
    bench.server.stop()
    watcher = bench.watcher()
    wait, pauses_s = watcher._stopping.wait, []

    def noted(pause_s: float) -> bool:
        pauses_s.append(pause_s)
        return wait(pause_s)

    watcher._stopping.wait = noted
    wait_for(lambda: len(pauses_s) >= 4)
    # Doubled, give or take a tenth of both.
    assert all(later > 1.5 * before for before, later in pairwise(pauses_s[:4]))


def test_closing_ends_the_thread_and_may_be_repeated(bench):
    watcher = bench.watcher()
    assert any(thread.name == "kvtier-calibration" for thread in threading.enumerate())
    watcher.close()
    watcher.close()
    polls = watcher.counters["polls"]
    assert not any(thread.name == "kvtier-calibration" for thread in threading.enumerate())
    assert watcher.counters["polls"] == polls
    assert watcher.curve() is None


def test_the_settings_are_enough_to_watch(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("KVTIER_REDIS_URL", bench.server.url)
    monkeypatch.setenv("KVTIER_CALIBRATION_POLL_S", str(POLL_S))
    bench.store.put(curve_document())
    watcher = watch(load_settings(), SERVED)
    try:
        assert watcher.wait_first_poll(SAFETY_S)
        assert watcher.curve() is not None
        assert len(list((tmp_path / "data" / "copies").rglob("curve:*.json"))) == 1
    finally:
        watcher.close()


def test_a_local_copy_that_cannot_be_written_is_logged_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    local = LocalCopy(tmp_path / "file")
    assert not local.save(curve_document())
    assert not local.save(curve_document())
    assert caplog.text.count("cannot be written") == 1
