"""The watcher: always an answer at once, the last good one whatever happens to the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from calibration_samples import DTYPE, MODEL, POLICY, REVISION, curve_document
from redis_server import RedisServer, redis_server
from waiting import SAFETY_S, wait_for

from kvtier.calibration.store.directory import LocalCopy
from kvtier.calibration.store.redis import RedisStore
from kvtier.calibration.store.watcher import CalibrationWatcher, Served, watch
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

    def watcher(self, store: RedisStore | None = None, **options) -> CalibrationWatcher:
        local = LocalCopy(self.local.directory)
        watcher = CalibrationWatcher(
            store or self.opened(), SERVED, local=local, poll_s=POLL_S, **options
        )
        self._stack.callback(watcher.close)
        assert watcher.wait_first_poll(SAFETY_S)
        return watcher


@pytest.fixture
def bench(tmp_path) -> Iterator[Bench]:
    with redis_server() as server, ExitStack() as stack:
        yield Bench(server, tmp_path / "calibration", stack)


def test_what_is_stored_is_used_as_soon_as_it_is_there_and_no_longer_than_that(bench):
    watcher = bench.watcher()
    assert watcher.curve() is None
    wait_for(lambda: watcher.counters["polls"] > 3)
    assert {name for name, n in watcher.counters.items() if n} == {"polls"}
    first, changed = curve_document(), curve_document(beta=0.0)
    bench.store.put(first)
    wait_for(lambda: watcher.curve() == first)
    before = watcher.curve()
    bench.store.put(changed)
    wait_for(lambda: watcher.curve() == changed)
    assert before.beta == -0.1, "what a caller holds never changes"
    assert watcher.counters["changes"] == 2
    # A deleted one does not come back when the store goes down.
    bench.store.delete(changed.key)
    wait_for(lambda: watcher.curve() is None)
    bench.server.stop()
    wait_for(lambda: watcher.counters["unavailable"] > 0)
    assert watcher.curve() is None


def test_a_store_that_does_not_answer_never_holds_a_reader_up(bench, monkeypatch):
    bench.store.put(curve_document())
    watcher = bench.watcher()
    known, get = watcher.curve(), RedisStore.get
    asked, free = threading.Event(), threading.Event()

    def held(store, key, **options):
        asked.set()
        assert free.wait(SAFETY_S)
        return get(store, key, **options)

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


@pytest.mark.parametrize("kind", ["whole", "broken", "of something else"])
def test_a_store_that_is_down_from_the_start_gives_the_local_copy(bench, caplog, kind):
    curve = curve_document(**({"dtype": "bfloat16"} if kind == "of something else" else {}))
    bench.local.save(curve)
    if kind == "broken":
        bench.local.path(curve.key).write_text('{"half a docu')
    bench.server.stop()
    watcher = bench.watcher()
    wait_for(lambda: watcher.counters["unavailable"] > 2)
    assert watcher.curve() == (curve if kind == "whole" else None)
    assert watcher.counters["local_copy"] == (kind == "whole"), "read once, not at every poll"
    assert caplog.text.count("is not used") == (kind == "broken")


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
    watcher = bench.watcher(bench.opened(url, SAFETY_S))
    wait_for(lambda: watcher.counters["refused"] > 1)
    assert caplog.text.count("store: refused") == 1
    assert "s3cr3t" not in caplog.text


def test_a_bug_does_not_end_the_thread_here_or_in_a_listener(bench, caplog):
    bench.store.put(curve_document())

    class Broken(RedisStore):
        broken = True

        def get(self, key, *, renew=False):
            if self.broken:
                raise ZeroDivisionError("a bug")
            return super().get(key, renew=renew)

    def full_disk(event: str) -> None:
        raise OSError(event)

    store = Broken(bench.server.url, timeout_s=0.1, ttl_s=1)
    watcher = bench.watcher(store, on_event=full_disk)
    wait_for(lambda: watcher.counters["unexpected"] > 3)
    assert caplog.text.count("ZeroDivisionError: a bug") == 1
    store.broken = False
    wait_for(lambda: watcher.curve() is not None)
    assert caplog.text.count("the listener to calibration events failed") == 1


def test_the_settings_are_enough_to_watch_and_closing_ends_it(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("KVTIER_REDIS_URL", bench.server.url)
    monkeypatch.setenv("KVTIER_CALIBRATION_POLL_S", str(POLL_S))
    bench.store.put(curve_document())
    watcher = watch(load_settings(), SERVED)
    try:
        assert watcher.wait_first_poll(SAFETY_S)
        assert watcher.curve() is not None
        assert len(list((tmp_path / "data" / "copies").rglob("curve:*.json"))) == 1
        assert any(thread.name == "kvtier-calibration" for thread in threading.enumerate())
    finally:
        watcher.close()
    watcher.close()
    assert not any(thread.name == "kvtier-calibration" for thread in threading.enumerate())


def test_a_local_copy_that_cannot_be_written_is_logged_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    local = LocalCopy(tmp_path / "file")
    assert not local.save(curve_document())
    assert not local.save(curve_document())
    assert caplog.text.count("cannot be written") == 1
