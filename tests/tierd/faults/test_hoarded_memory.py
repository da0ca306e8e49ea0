"""Memory that clients take and do not use: shares of it, budgets, and one copy for many readers."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hoarders import EXHAUSTED, MIB, UNAVAILABLE, Patience, stalled_put, whose
from live_tier import (
    blob_of,
    failing,
    fetch,
    header_of,
    in_process,
    key_of,
    live_tier,
    payload_of,
    raw_stub,
)
from waiting import SAFETY_S, wait_for

from kvtier.errors import TierExhaustedError, UsageError
from kvtier.tier.client import Landing, TierClient
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.options import TierOptions
from kvtier_tierd.stores.disk.store import DiskOptions

# ---- room in the shared memory


def test_a_namespace_reserves_a_part_of_the_memory_and_all_together_not_all_of_it(tier):
    stub_of = raw_stub(tier.address)
    token = tier.server.service.shared.token
    with stub_of as stub, TierClient(tier.address, "ada", shared=False, timeout_s=SAFETY_S) as ada:
        for number in range(8):
            ada.put(blob_of(number, MIB))

        def reserve(namespace, numbers, num_bytes):
            headers = [header_of(blob_of(n, num_bytes), namespace) for n in numbers]
            request = pb.ReserveRequest(headers=headers, lease_ms=60_000, shared_token=token)
            return [e.lease for e in stub.Reserve(request, metadata=whose(namespace)).extents]

        held = {name: reserve(name, range(100, 116), MIB) for name in ("bob", "eve")}
        assert [len(leases) for leases in held.values()] == [4, 4], "a quarter each"
        assert ada.exists([key_of(number) for number in range(8)]).leading_run == 8
        with failing(EXHAUSTED):
            reserve("bob", [1], 5000)
        held["carl"] = reserve("carl", range(1), MIB)
        with failing(EXHAUSTED):
            reserve("mallory", [1], 5000)
        stub.Release(pb.ReleaseRequest(leases=held["bob"]), metadata=whose("bob"))
        held["mallory"] = reserve("mallory", [1], 5000)
        assert len(held["mallory"]) == 1
        for name in ("eve", "carl", "mallory"):
            stub.Release(pb.ReleaseRequest(leases=held[name]), metadata=whose(name))
        large = reserve("bob", [1, 2], 10 * MIB)
        assert len(large) == 1, "one blob may be larger than that"
        stub.Release(pb.ReleaseRequest(leases=large), metadata=whose("bob"))


# ---- memory for what is on its way


def test_what_puts_have_sent_is_within_the_budget_and_beyond_it_refused():
    options = {"transfer_bytes": 8 * MIB, "max_blob_bytes": 4 * MIB}
    with in_process(**options) as tier, raw_stub(tier.address) as stub, ExitStack() as stack:
        budget = tier.server.budget
        for number, namespace in enumerate(("ada", "bob")):
            put = stalled_put(stub, number, 4 * MIB, 3 * MIB, namespace)
            stack.enter_context(put)
        wait_for(lambda: budget.used_bytes == 6 * MIB)
        with stalled_put(stub, 9, 3 * MIB, 2 * MIB, "ada") as (call, _):
            assert call.exception(SAFETY_S).code() is EXHAUSTED, "no namespace has more than half"
        with stalled_put(stub, 9, 4 * MIB, 4 * MIB, "eve") as (call, _):
            assert call.exception(SAFETY_S).code() is EXHAUSTED
            assert "--transfer-memory" in call.exception().details()
        assert budget.used_bytes == 6 * MIB
        stack.close()
        wait_for(lambda: budget.used_bytes == 0)
        with TierClient(tier.address, timeout_s=SAFETY_S) as client:
            assert client.put(blob_of(9, 4 * MIB))


def test_readers_of_a_blob_on_disk_share_one_copy_of_it(tmp_path, monkeypatch):
    options = {"transfer_bytes": 32 * MIB, "max_blob_bytes": 16 * MIB}
    with (
        in_process(store=DiskOptions(tmp_path), **options) as tier,
        raw_stub(tier.address) as stub,
        TierClient(tier.address, timeout_s=SAFETY_S) as client,
    ):
        for number in range(3):
            client.put(blob_of(number, 12 * MIB))
        reads, real = [], tier.store._medium.read
        monkeypatch.setattr(
            tier.store._medium, "read", lambda row: reads.append(row.file) or real(row)
        )
        calls = [stub.Get(pb.GetRequest(keys=[key_of(1)])) for _ in range(24)]
        for call in calls:
            assert next(call).header.num_bytes == 12 * MIB
        assert len(reads) == 1
        assert tier.server.budget.used_bytes == 12 * MIB
        with failing(EXHAUSTED):
            list(stub.Get(pb.GetRequest(keys=[key_of(2)])))
        for call in calls[1:]:
            call.cancel()
        rest = b"".join(response.chunk for response in calls[0])
        assert rest == payload_of(1, 12 * MIB), "the others' going is nothing to it"
        wait_for(lambda: tier.problems() == [])
        assert fetch(client, [key_of(2)])[0] == [Landing.LANDED]


def resident_bytes(tier):
    with open(f"/proc/{tier.process.pid}/status") as status:
        (line,) = (line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def test_a_service_with_a_disk_grows_by_one_blob_for_many_who_do_not_read_it(tmp_path):
    """24 of them made it 1.5 GiB larger, of 64 MiB each; here they are a quarter of that."""
    flags = ("--store", "disk", "--disk-path", str(tmp_path / "disk"))
    size = 16 * MIB
    with (
        live_tier(tmp_path, *flags) as tier,
        raw_stub(tier.address) as stub,
        TierClient(tier.address, timeout_s=SAFETY_S) as client,
    ):
        client.connect()
        client.put(blob_of(1, size))
        before = resident_bytes(tier)
        calls = [stub.Get(pb.GetRequest(keys=[key_of(1)])) for _ in range(24)]
        for call in calls:
            next(call)
        # gRPC holds a chunk or two of each stream.
        assert resident_bytes(tier) - before < 24 * 4 * MIB + size
        for call in calls:
            call.cancel()


def test_a_budget_that_no_blob_fits_into_is_refused_naming_the_flag():
    with pytest.raises(UsageError, match="--transfer-memory: expected at least twice --max-blob"):
        TierOptions(transfer_bytes=2 * MIB - 1, max_blob_bytes=MIB)
    for stall_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="--stall-s"):
            TierOptions(stall_s=stall_s)


def test_errors_of_a_stall_and_of_a_budget_reach_our_client_as_its_own(monkeypatch):
    patience = Patience(monkeypatch)
    options = {"transfer_bytes": 4 * MIB, "max_blob_bytes": 2 * MIB}
    with (
        in_process(**options) as tier,
        raw_stub(tier.address) as stub,
        stalled_put(stub, 1, 2 * MIB, 2 * MIB - 1) as (call, _),
    ):
        wait_for(lambda: tier.server.budget.used_bytes > 0)
        with (
            TierClient(tier.address, timeout_s=SAFETY_S) as client,
            pytest.raises(TierExhaustedError),
        ):
            client.put(blob_of(2, MIB))
        patience.runs_out(tier, stub)
        assert call.exception(SAFETY_S).code() is UNAVAILABLE
