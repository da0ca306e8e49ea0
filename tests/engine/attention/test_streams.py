"""Copies are in order with the stream of the caller that asked. On a GPU the streams are kept busy,
so that what does not wait reads what was there before; on a CPU there is one order of things."""

import torch

from kvtier_sglang.streams import SideCopies

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BYTES = 8 << 20


def keep_busy() -> None:
    """Queue some tens of milliseconds of work on the current stream."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(50_000_000)


def test_what_is_copied_out_is_what_was_there_when_it_was_asked_for():
    copies = SideCopies(DEVICE)
    payloads = []
    for number in range(6):
        payload = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=DEVICE)
        keep_busy()
        payload.fill_(number + 1)
        payloads.append(copies.to_host(payload))
        # Its memory goes to the next one.
        del payload
    for number, payload in enumerate(payloads):
        if payload.ready is not None:
            payload.ready()
        assert payload.rows.device.type == "cpu"
        assert bool((payload.rows == number + 1).all())


def test_what_is_copied_in_is_there_for_the_callers_stream():
    copies = SideCopies(DEVICE)
    total = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for number in range(6):
        host = torch.full((NUM_BYTES,), number + 1, dtype=torch.uint8)
        there = copies.to_device(host)
        assert there.device.type == DEVICE.type
        keep_busy()
        total += there.sum(dtype=torch.int64)
        del there
    assert int(total) == NUM_BYTES * sum(range(1, 7))
