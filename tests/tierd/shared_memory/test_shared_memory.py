"""The same host: one file that service and clients map, and a stream for what is not in it."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
from live_tier import LAYOUT, blob_of, connected, fetch, in_process, key_of, live_tier, payload_of
from waiting import wait_for

from kvtier.errors import TierUnavailableError
from kvtier.tier.client import Blob, Landing
from kvtier.tier.transport.shared_memory import SharedMemory


def test_a_flipped_byte_in_the_file_is_corrupt_then_quarantined_then_missing(tier, client):
    for number in range(4):
        client.put(blob_of(number))
    before = client.stats().used_bytes
    with open(tier.server.service.shared.path, "r+b") as file:
        damaged = file.read().index(payload_of(2)) + 5000
        file.seek(damaged)
        file.write(bytes([payload_of(2)[5000] ^ 1]))
    outcome, landed = fetch(client, [key_of(number) for number in range(4)])
    assert [one.name for one in outcome] == ["LANDED", "LANDED", "CORRUPT", "LANDED"]
    assert landed == {number: payload_of(number) for number in (0, 1, 3)}
    assert client.stats().quarantined == 1
    assert client.exists([key_of(2)]).leading_run == 0
    assert fetch(client, [key_of(2)])[0] == [Landing.MISSING]
    assert client.stats().used_bytes == before * 3 // 4
    assert client.put(blob_of(2))
    assert fetch(client, [key_of(2)])[1] == {0: payload_of(2)}


def test_a_client_that_has_mapped_the_memory_of_an_earlier_service_writes_nothing(tmp_path):
    """It finds out at its next call, connects again, and goes on."""
    directory = tmp_path / "shm"
    directory.mkdir()
    flags = ("--shared-memory", str(directory), "--memory", "1m")
    with live_tier(tmp_path, *flags) as tier, connected(tier) as client:
        assert client.put(blob_of(1))
        (old,) = directory.iterdir()
        tier.kill()
        tier.start()
        (new,) = directory.iterdir()
        assert new != old, "the file of the killed one is gone"
        wait_for(lambda: _answers(client))
        blank = new.read_bytes()[4096:]
        with pytest.raises(TierUnavailableError, match="connect again"):
            client.put(blob_of(2))
        with pytest.raises(TierUnavailableError, match="connect again"):
            fetch(client, [key_of(1)])
        assert new.read_bytes()[4096:] == blank
        client.connect()
        assert client.put(blob_of(2))
        assert fetch(client, [key_of(1), key_of(2)])[1] == {1: payload_of(2)}
        assert tier.terminate() == 0
        assert list(directory.iterdir()) == []


def _answers(client):
    try:
        client.stats()
    except TierUnavailableError:
        return False
    return True


def test_a_file_that_is_not_the_services_memory_is_not_mapped(memory_directory, tmp_path):
    token = bytes(range(16))

    def opened(path, num_bytes=4096, token=token):
        return SharedMemory.open(str(path), num_bytes, token)

    real = memory_directory / "kvtier-tier-1"
    real.write_bytes(token + bytes(4080))
    assert opened(real) is not None
    assert opened(real, token=bytes(16)) is None
    assert opened(real, token=b"") is None
    assert opened(real, num_bytes=8192) is None
    assert opened(real, num_bytes=1 << 63) is None
    assert opened(f"{real}\0") is None
    assert opened(memory_directory / "kvtier-tier-2") is None
    private = tmp_path / "private"
    private.write_bytes(token + bytes(4080))
    assert opened(private) is None, "a service may name any path"
    link = memory_directory / "kvtier-tier-link"
    link.symlink_to(private)
    assert opened(link) is None
    pipe = memory_directory / "kvtier-tier-pipe"
    os.mkfifo(pipe)
    assert opened(pipe, num_bytes=0) is None


def test_a_client_elsewhere_streams(memory_directory):
    with in_process(shared_directory=memory_directory) as tier:
        os.rename(tier.server.service.shared.path, memory_directory / "elsewhere")
        with connected(tier) as client:
            assert not client.shares_memory
            assert client.put(blob_of(1))
            assert fetch(client, [key_of(1)])[1] == {0: payload_of(1)}


def test_what_is_not_in_shared_memory_comes_by_the_stream(tier, client, monkeypatch):
    """The blobs come as from a disk behind a memory that has no room."""
    for number in range(4):
        client.put(blob_of(number))
    real_open = tier.store.open

    async def open_elsewhere(name):
        handle = await real_open(name)
        if handle is not None and name.key in (key_of(1), key_of(3)):
            handle.offset = None
        return handle

    monkeypatch.setattr(tier.store, "open", open_elsewhere)
    outcome, landed = fetch(client, [key_of(number) for number in range(5)])
    assert outcome == [Landing.LANDED] * 4 + [Landing.MISSING]
    assert landed == {number: payload_of(number) for number in range(4)}


def test_reconnecting_while_others_copy_disturbs_none_of_them(tier):
    """The mapping is replaced under the hands of threads that use it."""
    with connected(tier) as client:
        blobs = [blob_of(number, 300_000) for number in range(4)]
        ended, failures = threading.Event(), []

        def use():
            while not ended.is_set():
                try:
                    for blob in blobs:
                        client.put(blob)
                    _, landed = fetch(client, [blob.key for blob in blobs])
                    for position, payload in landed.items():
                        assert payload == blobs[position].payload[0]
                except Exception as error:
                    failures.append(error)

        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            client._shared = None
            client.connect()
        ended.set()
        for thread in threads:
            thread.join()
        assert failures == []


def test_nothing_that_is_open_is_handed_down_to_other_programs(memory_directory):
    """Neither sockets nor the memory: a program started later would keep them."""
    before = inheritable()
    with in_process(shared_directory=memory_directory) as tier, connected(tier) as client:
        assert client.shares_memory
        client.put(Blob(key_of(1), LAYOUT, [bytes(10)]))
        assert inheritable() <= before


def inheritable() -> set[str]:
    """Return what a program that is started now would have open."""
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.get_inheritable(int(fd)):
                names.add(os.readlink(f"/proc/self/fd/{fd}"))
    return names
