"""The request log: what readers of traces and `kvtier trace explain` read of it, and that neither
text nor a full disk matter to it.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tree_harness import MiniScheduler, run_turn
from tree_requests import Request, context
from waiting import wait_for

from kvtier.config import Settings
from kvtier.retention.shares import FixedShare
from kvtier.traffic.continuations import sessions_of
from kvtier.traffic.formats import read_trace
from kvtier.traffic.request_log import read_log, sums_of
from kvtier_sglang.radix import request_log
from kvtier_sglang.radix.request_log import RequestLog
from kvtier_sglang.ranks import Ranks
from kvtier_sglang.runtime import Runtime


def scheduler(log: RequestLog) -> MiniScheduler:
    s = MiniScheduler(size=2000, share=FixedShare(0.4), adaptive=True)
    s.tree.log = log
    return s


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def served(file: Path, seed: int = 0) -> list[Request]:
    """Two turns of one session, one of another, and one that was evicted."""
    log = RequestLog(file)
    s = scheduler(log)
    first, other = context(150, seed=seed), context(70, seed=seed + 50)
    ended = [
        run_turn(s, first, [1, 2]),
        run_turn(s, other, [3], extra_key="ada"),
        run_turn(s, [*first, 1, 2, *context(20, seed=1)], [3, 4, 5]),
    ]
    s.tree.evict(EvictParams(num_tokens=s.allocator.size))
    ended.append(run_turn(s, [*other, 3, 7, 7], [9], extra_key="ada"))
    log.close()
    return ended


@pytest.fixture
def blocks_of_32(monkeypatch):
    from kvtier.traffic import formats

    for module in (request_log, formats):
        monkeypatch.setattr(module, "BLOCK_TOKENS", 32)


def test_readers_of_traces_read_lengths_prefixes_and_sessions(tmp_path, blocks_of_32):
    file = tmp_path / "log.jsonl"
    served(file)
    trace = read_trace(file)
    assert [one.input_tokens for one in trace.requests] == [150, 70, 172, 73]
    assert [one.output_tokens for one in trace.requests] == [2, 1, 3, 1]
    a, b, c, d = (one.block_ids for one in trace.requests)
    assert (a[:4], b[:2]) == (c[:4], d[:2])
    assert not set(a) & set(b)
    assert len({*a, *b, *c, *d}) == 5 + 3 + 2 + 1
    assert sessions_of(trace) == [0, 1, 0, 1]
    arrivals = [one.arrival_s for one in trace.requests]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)


def test_a_line_says_what_became_of_the_prompt(tmp_path):
    file = tmp_path / "log.jsonl"
    ended = served(file)
    told = list(read_log(file))
    for request, line in zip(ended, told, strict=True):
        account = request.kvtier_account
        assert (line.hit, line.computed) == (account.hit, account.computed)
        assert line.recomputed == dict(account.recomputed)
    assert told[3].recomputed == {"evicted": 71}
    every, sessions = sums_of(told)
    assert every.tokens == every.hit + every.restored + every.new + every.recomputed_tokens
    assert sorted(one.requests for one in sessions.values()) == [2, 2]


def test_ids_of_two_files_have_nothing_in_common(tmp_path):
    """Each log has a key of its own, so nobody who has a text can look for it."""
    found = []
    for name in ("a", "b"):
        served(tmp_path / name)
        told = lines(tmp_path / name)
        found.append({*(one for line in told for one in line["hash_ids"])})
        found[-1] |= {line["session_id"] for line in told}
    assert len(found[0]) == len(found[1])
    assert not found[0] & found[1]


def test_what_was_said_is_in_no_line(tmp_path):
    """Two servers that did the same with other tokens say the same, but for keyed hashes and
    times."""
    told = []
    for seed in (0, 1):
        file = tmp_path / f"{seed}"
        served(file, seed=seed)
        told.append(lines(file))
        for line in told[-1]:
            assert set(line.pop("hash_ids")).isdisjoint(range(1 << 20))
            del line["session_id"], line["timestamp"], line["kvtier"]["time"]
    assert told[0] == told[1]


def test_a_file_is_gone_on_with_in_the_same_time(tmp_path, monkeypatch, blocks_of_32):
    file = tmp_path / "log.jsonl"
    served(file)
    from kvtier_sglang.radix import misses

    before = misses.arrival
    monkeypatch.setattr(misses, "arrival", lambda req: before(req) + 3600)
    served(file)
    trace = read_trace(file)
    arrivals = [one.arrival_s for one in trace.requests]
    assert len(arrivals) == 8
    assert arrivals[3] < 3600 <= arrivals[4] + 1
    assert len({one.session for one in trace.requests}) == 4


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


def test_others_may_not_read_the_log(tmp_path):
    """It tells who asked when, and how much."""
    served(tmp_path / "log.jsonl")
    assert stat.S_IMODE((tmp_path / "log.jsonl").stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize(("replica", "name"), [(0, "log.jsonl"), (1, "log.1.jsonl")])
def test_each_replica_has_a_file_of_its_own(tmp_path, replica, name):
    runtime = Runtime()
    runtime.settings = Settings(request_log=tmp_path / "log.jsonl")
    runtime.ranks = Ranks(replica=replica)
    log = runtime._request_log()
    log.close()
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_only_the_first_rank_of_a_replica_keeps_a_log(tmp_path):
    runtime = Runtime()
    runtime.settings = Settings(request_log=tmp_path / "log.jsonl")
    runtime.ranks = Ranks(SimpleNamespace(world_size=2, rank_in_group=1))
    assert runtime._request_log() is None
    assert list(tmp_path.iterdir()) == []
