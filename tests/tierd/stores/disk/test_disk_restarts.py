"""The disk store over restarts, kills and fewer bytes: what was committed is there afterwards."""

from __future__ import annotations

import shutil
from argparse import Namespace

from disk_play import COST, payload_files, play, put_some
from hypothesis import given, settings
from hypothesis import strategies as st
from store_blobs import blob_name, get, held, info_of, payload_of, put
from store_model import ALL_NAMES, STEPS, Model

from benchmarks.tier import crash as tier_crash
from kvtier_tierd.stores.base import BlobName
from kvtier_tierd.stores.disk.store import DiskStore


def test_blobs_outlive_the_store_with_everything_that_came_with_them(directory):
    layout = payload_of("layout", 4096)
    names = [BlobName("ü" * 100, b"\0" * 32), BlobName("", b"\xff" * 32), blob_name(1)]

    async def write(store: DiskStore) -> None:
        for number, name in enumerate(names):
            draft = await store.reserve(name, info_of(payload_of(number), layout))
            draft.buffer[:] = payload_of(number)
            await store.commit(draft)

    async def read(store: DiskStore) -> None:
        for number, name in enumerate(names):
            handle = await store.open(name)
            assert handle.info == info_of(payload_of(number), layout)
            assert bytes(handle.pieces[0]) == payload_of(number)
            assert handle.pieces[0].readonly
            handle.close()
        assert store.stats().blobs == len(names)

    play(directory, write)
    play(directory, read)


@settings(max_examples=30)
@given(st.lists(STEPS, max_size=30))
def test_a_restart_changes_neither_the_blobs_nor_who_goes_first(tmp_path_factory, steps):
    directory, capacity = tmp_path_factory.mktemp("disk"), 128 << 10

    async def write(store: DiskStore) -> list[BlobName]:
        model = Model(store)
        for step, *arguments in steps:
            await getattr(model, step)(*arguments)
        await model.settle()
        kept.update({name: model.committed[name] for name in store.account.entries})
        return list(store.account.entries)

    async def read(store: DiskStore) -> list[BlobName]:
        order = list(store.account.entries)
        for name in ALL_NAMES:
            assert await get(store, name) == kept.get(name)
        return order

    kept: dict[BlobName, bytes] = {}
    written = play(directory, write, capacity)
    assert play(directory, read, capacity) == written


def test_a_thousand_kills_in_small(tmp_path):
    """benchmarks.tier.crash is the same, 1000 times."""
    outcome = tier_crash.kill_often(tmp_path / "disk", kills=30, seed=1)
    assert outcome.failures == 0
    assert min(outcome.interrupted, outcome.leftover_files, outcome.blobs_that_must_be_there) > 0


def test_the_journal_of_kills_sees_every_kind_of_failure():
    def judged(lines: list[str], found: int | None) -> tier_crash.Outcome:
        outcome, journal = tier_crash.Outcome(), tier_crash.Journal()
        journal.read(lines, outcome)
        journal.judge(1, found, outcome)
        return outcome

    put_twice = ["put 1 7 100", "done 1", "put 1 8 100", "done 1"]
    assert judged(put_twice, 8).failures == 0
    assert judged(put_twice, 7).outdated == 1
    assert judged(put_twice, None).lost == 1
    assert judged(put_twice[:3], 7).failures == judged(put_twice[:3], 8).failures == 0
    assert judged(put_twice[:3], None).lost == 1
    assert judged([*put_twice, "delete 1"], None).failures == 0
    assert judged([*put_twice, "delete 1", "done 1"], 8).came_back == 1
    evicted = [*put_twice, f"put 2 1 {tier_crash.CAPACITY_BYTES}", "done 2"]
    assert judged(evicted, None).failures == 0


def test_what_was_deleted_or_quarantined_stays_away_after_a_crash(directory):
    async def crash(store: DiskStore) -> None:
        await put_some(store)
        await store.delete(blob_name(0))
        await store.quarantine(blob_name(1))
        await put(store, blob_name(2), payload_of("new"))
        shutil.copytree(directory, directory.with_name("crashed"))

    async def read(store: DiskStore) -> None:
        assert await held(store, 0, 1, 2, 3) == [2, 3]
        assert await get(store, blob_name(2)) == payload_of("new")

    play(directory, crash)
    play(directory.with_name("crashed"), read)


def test_less_capacity_than_before_keeps_what_was_used_last(directory):
    async def use(store: DiskStore) -> None:
        await put_some(store)
        await get(store, blob_name(0))

    async def read(store: DiskStore) -> list[int]:
        assert len(payload_files(directory)) == store.stats().blobs
        return await held(store, 0, 1, 2, 3)

    play(directory, use)
    assert play(directory, read, 2 * COST) == [0, 3]
    assert play(directory, read, 2 * COST, {"a": COST}) == [0]
    assert play(directory, read, 2 * COST, {"b": COST}) == [0]


def test_the_command_writes_what_it_saw(tmp_path):
    options = ["--kills", "2", "--out", str(tmp_path / "out.json"), "--seed", "3"]
    assert tier_crash.main(options) == 0
    assert '"corrupt": 0' in (tmp_path / "out.json").read_text()
    assert tier_crash.main(["--kills", "0"]) == 2
    assert isinstance(tier_crash.BENCHMARK.parse([]), Namespace)
