"""Fixtures of the tier service's tests."""

from __future__ import annotations

import asyncio
import inspect
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import lmdb
import pytest
from live_tier import InProcessTier, connected, in_process, raw_stub
from mooncake_master import MooncakeMaster, missing

from kvtier.tier.client import TierClient
from kvtier.v1.tier_pb2_grpc import TierServiceStub


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Stores in the tests' own process do not wait for the disk."""
    unsynced = partial(lmdb.open, sync=False)
    with (
        mock.patch.object(os, "fsync"),
        mock.patch.object(os, "fdatasync"),
        mock.patch.object(lmdb, "open", unsynced),
    ):
        yield


@pytest.fixture(scope="session")
def mooncake() -> None:
    """Skips without a mooncake_master, or fails where KVTIER_REQUIRE_MOONCAKE=1 wants one."""
    reason = missing()
    if reason and os.environ.get("KVTIER_REQUIRE_MOONCAKE") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def master(mooncake: None) -> Iterator[MooncakeMaster]:
    """Start a master for all the tests of a module, with whatever segments the earlier ones have
    left."""
    with MooncakeMaster() as one:
        yield one


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Name the place of a disk store, where nothing is yet."""
    return tmp_path / "disk"


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    """Make a directory where the service makes its shared file by default, but for one test
    alone."""
    with tempfile.TemporaryDirectory(prefix="kvt", dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def tier(memory_directory: Path) -> Iterator[InProcessTier]:
    """A service of 16 MiB that shares its memory; whole at the end, and none of it held."""
    with in_process(shared_directory=memory_directory) as tier:
        yield tier
        assert tier.problems() == []


@pytest.fixture
def client(tier: InProcessTier) -> Iterator[TierClient]:
    """A client that shares the service's memory."""
    with connected(tier) as client:
        assert client.shares_memory
        yield client


@pytest.fixture
def stub(tier: InProcessTier) -> Iterator[TierServiceStub]:
    """A stub of the service."""
    with raw_stub(tier.address) as stub:
        yield stub


@pytest.fixture
def token(tier: InProcessTier) -> bytes:
    """The beginning of the service's shared memory, which its clients have to say."""
    return tier.store.shared.token
