"""The request log: neither text nor a full disk matter to it. That readers of traces and `kvtier
trace explain` read it is in tests/engine/serving/test_served_log.py.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tree_harness import MiniScheduler, run_turn
from tree_requests import context
from waiting import wait_for

from kvtier.config import Settings
from kvtier.retention.shares import FixedShare
from kvtier.traffic.formats import read_trace
from kvtier.traffic.request_log import read_log
from kvtier_sglang.radix import misses, request_log
from kvtier_sglang.radix.request_log import RequestLog
from kvtier_sglang.ranks import Ranks
from kvtier_sglang.runtime import Runtime


def scheduler(log: RequestLog) -> MiniScheduler:
    s = MiniScheduler(size=2000, share=FixedShare(0.4), adaptive=True)
    s.tree.log = log
    return s


def served(file: Path, seed: int = 0) -> None:
    """Two turns of one session, one of another, and one that was evicted."""
    log = RequestLog(file)
    s = scheduler(log)
    first, other = context(150, seed=seed), context(70, seed=seed + 50)
    run_turn(s, first, [1, 2])
    run_turn(s, other, [3], extra_key="ada")
    run_turn(s, [*first, 1, 2, *context(20, seed=1)], [3, 4, 5])
    s.tree.evict(EvictParams(num_tokens=s.allocator.size))
    run_turn(s, [*other, 3, 7, 7], [9], extra_key="ada")
    log.close()


def test_what_was_said_is_in_no_line_and_ids_of_two_files_have_nothing_in_common(tmp_path):
    """Two servers that did the same with other tokens say the same, but for keyed hashes and times.
    Each log has a key of its own, so nobody who has a text can look for it; and others may not read
    the log, which tells who asked when, and how much."""
    told, ids = [], []
    for name, seed in (("one", 0), ("same text", 0), ("another text", 1)):
        file = tmp_path / name
        served(file, seed=seed)
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0
        told.append([json.loads(line) for line in file.read_text().splitlines()])
        ids.append(set())
        for line in told[-1]:
            ids[-1] |= {*line["hash_ids"], line["session_id"]}
            assert set(line.pop("hash_ids")).isdisjoint(range(1 << 20))
            del line["session_id"], line["timestamp"], line["kvtier"]["time"]
    assert told[0] == told[1] == told[2]
    assert len(ids[0]) == len(ids[1])
    assert not ids[0] & ids[1]


def test_a_file_is_gone_on_with_in_the_same_time(tmp_path, monkeypatch):
    file = tmp_path / "log.jsonl"
    served(file)
    before = misses.arrival
    monkeypatch.setattr(misses, "arrival", lambda req: before(req) + 3600)
    served(file)
    trace = read_trace(file)
    assert [one.output_tokens for one in trace.requests] == 2 * [2, 1, 3, 1]
    assert len({one.session for one in trace.requests}) == 4
    arrivals = [one.arrival_s for one in trace.requests]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)
    assert arrivals[3] < 3600 <= arrivals[4] + 1


def test_an_aborted_request_says_how_far_it_came(tmp_path):
    file = tmp_path / "log.jsonl"
    s = scheduler(RequestLog(file))
    request = s.admit(context(100))
    s.extend(request, 40)
    s.checkpoint(request)
    s.release(request, checkpoint=False, aborted=True)
    waits = s.admit(context(30, seed=3))
    s.tree.release_aborted_request(waits)
    s.tree.log.close()
    (line,) = read_log(file)
    assert (line.tokens, line.hit, line.computed) == (100, 0, 40)
    assert read_trace(file).requests[0].output_tokens == 1


def test_sessions_go_by_whatever_name_their_client_gives(tmp_path):
    """JSON has names that no file can, and long ones, of which a cache remembers thousands."""
    log = RequestLog(tmp_path / "log.jsonl")
    s = scheduler(log)
    names = ["a", "\ud800", "\ud801", "a" * 100_000, "\ud800", "a"]
    for seed, name in enumerate(names):
        run_turn(s, context(60, seed=seed), [1], session_id=name)
    assert max(len(node.session) for node in s.tree.nodes()) < 100
    log.close()
    told = [one.session for one in read_trace(tmp_path / "log.jsonl").requests]
    assert [told.index(one) for one in told] == [names.index(one) for one in names]


@pytest.mark.parametrize("broken", ["full disk", "no folder", "a folder", "another file"])
def test_a_log_that_cannot_be_written_warns_once_and_ends_nothing(tmp_path, caplog, broken):
    file = {
        "full disk": Path("/dev/full"), "no folder": tmp_path / "none" / "log.jsonl",
        "a folder": tmp_path, "another file": tmp_path / "notes.txt",
    }[broken]  # fmt: skip
    if broken == "another file":
        file.write_text("not a log\n")
    log = RequestLog(file)
    s = scheduler(log)
    for seed in range(3):
        assert run_turn(s, context(60, seed=seed), [1]).done
    wait_for(lambda: not log.is_on)
    run_turn(s, context(60, seed=9), [1])
    log.close()
    assert caplog.text.count("the request log failed and is off from now on") == 1
    if broken == "another file":
        assert file.read_text() == "not a log\n"


def test_a_disk_that_has_room_for_half_a_line_keeps_none_of_it(tmp_path):
    class Short:
        """A file with so little room."""

        def __init__(self, file) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            return self.file.write(data[:10])

        def __getattr__(self, name):
            return getattr(self.file, name)

    file = tmp_path / "log.jsonl"
    file.write_bytes(b"{}\n")
    with file.open("ab", buffering=0) as stream, pytest.raises(OSError, match="10 of"):
        request_log.append(Short(stream), {"timestamp": 1})
    assert file.read_bytes() == b"{}\n"


def test_a_disk_that_is_too_slow_costs_lines_and_no_request(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(request_log, "MOST_WAITING", 2)
    monkeypatch.setattr(request_log, "CLOSING_S", 0.0)
    monkeypatch.setattr(RequestLog, "_run", lambda self: None)
    log = RequestLog(tmp_path / "log.jsonl")
    s = scheduler(log)
    for seed in range(5):
        run_turn(s, context(60, seed=seed), [1])
    log.close()
    assert log.lost == 3
    assert caplog.text.count("written too slowly") == 1


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (Ranks(replica=0), ["log.jsonl"]),
        (Ranks(replica=1), ["log.1.jsonl"]),
        (Ranks(SimpleNamespace(world_size=2, rank_in_group=1)), []),
    ],
    ids=["first replica", "second replica", "second rank"],
)
def test_the_first_rank_of_each_replica_has_a_file_of_its_own(tmp_path, ranks, names):
    runtime = Runtime()
    runtime.settings = Settings(request_log=tmp_path / "log.jsonl")
    runtime.ranks = ranks
    log = runtime._request_log()
    if log is not None:
        log.close()
    assert [one.name for one in tmp_path.iterdir()] == names
