"""The simulator of a fleet: what must hold of every outcome, and what it must agree with."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from traffic.trace_models import lru_hit_rate, make_trace

from kvtier.errors import UsageError
from kvtier.plan.fleet import ROUTINGS, SCHEDULE_POLICIES, Cache, FleetPlan, Rates, Windows
from kvtier.plan.hints import Hints, away_s
from kvtier.plan.simulate import Outcome, run, simulate
from kvtier.retention.shares.base import CODED_PAGES
from kvtier.traffic.described import Description, make_traffic
from kvtier.traffic.prefixes import Traffic, copies, traffic_of
from kvtier.traffic.trace import Trace, TraceRequest

RATES = Rates(
    prefill_base_s=0.005,
    prefill_token_s=4e-5,
    prefill_pair_s=1e-9,
    decode_base_s=0.01,
    decode_request_s=1e-4,
    decode_token_s=2e-8,
    tier_latency_s=0.002,
    tier_token_s=1e-5,
    tier_shared_token_s=1e-6,
    tier_spill_token_s=1e-5,
)
FULL = Cache("full", slots=30_000)
WINDOWS = Windows(sink=4, recent=256, branch_recent=64)
QUARTER = Cache("kvtier", 30_000, compresses=True, retention=0.25, windows=WINDOWS)
HALF = replace(QUARTER, retention=0.5)
TIERED = replace(QUARTER, policy="kvtier-tier", tier_tokens=100_000)
CODED = replace(QUARTER, page=CODED_PAGES["int4"])
# Some prompts are longer than this.
TIGHT = replace(TIERED, slots=4_000)
STREAMING = replace(CODED, compress_prefill="always")
CACHES = (FULL, QUARTER, HALF, TIERED, CODED, TIGHT, STREAMING)


def small_traffic(seed: int) -> Traffic:
    """Recorded or described, as the seed says."""
    if seed % 2:
        return traffic_of(
            make_trace(seed, conversations=12, turns=4), answers_continue=seed % 3 > 0
        )
    described = Description(
        sessions=15, sessions_per_s=3.0, turns=4, shared_tokens=300, context_tokens=1500,
        turn_tokens=200, output_tokens=40, think_s=2.0, max_tokens=12_000,
    )  # fmt: skip
    return make_traffic(described, seed)


def check(outcome: Outcome) -> None:
    """Check what holds of every outcome."""
    served = ~outcome.refused
    assert not np.isnan(outcome.finish_s[served]).any()
    assert (outcome.first_s[served] > outcome.arrived_s[served]).all()
    assert (outcome.finish_s[served] >= outcome.first_s[served]).all()
    assert np.isnan(outcome.first_s[outcome.refused]).all()
    hit = outcome.hit_device + outcome.hit_tier
    assert (hit[served] < outcome.traffic.input_tokens[served]).all()
    assert outcome.peak_slots <= outcome.plan.cache.slots
    assert 0 <= outcome.resident_sessions <= outcome.traffic.num_sessions
    # A turn comes after the answer before it.
    later = outcome.traffic.next_request
    waits = (later >= 0) & served
    assert (outcome.arrived_s[later[waits]] >= outcome.finish_s[waits]).all()


def drawn_hints(traffic: Traffic, seed: int) -> Hints:
    rng, count = np.random.default_rng(seed), traffic.num_sessions + 1
    return Hints(
        priority=rng.integers(0, 3, count).astype(float),
        retention=rng.choice([0.1, 0.25], count),
        away_s=np.where(rng.random(traffic.num_requests) < 0.3, np.nan, away_s(traffic)),
    )


@given(
    st.integers(0, 10_000),
    st.sampled_from(CACHES),
    st.sampled_from(ROUTINGS),
    st.sampled_from(SCHEDULE_POLICIES),
    st.integers(1, 4),
    st.sampled_from([512, 8192]),
    st.booleans(),
)
@settings(max_examples=80)
def test_every_request_ends_once_in_order_and_every_slot_is_in_a_unit(
    seed, cache, routing, policy, replicas, chunk, hinted
):
    """Nothing is locked once all is answered, and every leaf is older than its beginning."""
    plan = FleetPlan(
        replicas, RATES, cache, chunk_tokens=chunk, max_running=8, routing=routing,
        schedule_policy=policy,
    )  # fmt: skip
    traffic = small_traffic(seed)
    hints = drawn_hints(traffic, seed) if hinted else None
    check(simulate(traffic, plan, hints))
    world, _, _ = run(traffic, plan, hints)
    units, found = world.units, world.replicas
    for replica in range(replicas):
        own = np.flatnonzero(units.replica == replica)
        own = own[own >= replicas]
        assert (units.locks[own] == 0).all()
        assert found.used[replica] == units.slots[own].sum() <= cache.slots
        assert (units.slots[own] >= 0).all()
        assert (units.slots[own] <= units.stop[own] - units.start[own]).all()
        if hinted:
            continue
        assert found.evictable[replica] == found.used[replica]
        order = []
        unit = found.oldest[replica]
        while unit != -1:
            order.append(unit)
            unit = units.newer[unit]
        assert sorted(order) == own.tolist()
        place = {unit: index for index, unit in enumerate(order)}
        for unit in order:
            parent = units.parent[unit]
            assert parent == replica or place[parent] > place[unit]
            assert units.start[unit] == units.stop[parent]
    assert world.totals.free_units[0] == (units.replica == -1).sum()
    assert world.totals.held[0] == world.kept.held.sum() <= cache.tier_tokens


@given(st.integers(0, 10_000))
@example(55)  # A short request after a long one: nothing of the long one's path is left behind.
@settings(max_examples=30)
def test_with_room_for_all_a_replica_hits_what_an_endless_cache_hits(seed):
    trace = make_trace(seed, gap_s=1000.0)
    literal = replace(trace, requests=tuple(replace(r, output_tokens=1) for r in trace.requests))
    traffic = traffic_of(literal, answers_continue=False)
    plan = FleetPlan(1, RATES, replace(FULL, slots=10**9))
    outcome = simulate(traffic, plan)
    hit = int(outcome.hit_device.sum()) / int(traffic.input_tokens.sum())
    # The tests below tell apart what goes on in the middle of a block, or ends with one that is
    # known.
    whole = outcome.hit_device // trace.block_tokens * trace.block_tokens
    by_book = lru_hit_rate(literal, math.inf)
    assert hit >= by_book - 1e-9
    assert whole.sum() / traffic.input_tokens.sum() == pytest.approx(by_book, abs=0.02)


def test_a_lone_request_takes_what_its_passes_take():
    traffic = small_traffic(0)
    alone = Traffic(*(column[:1] for column in traffic[:9]), *traffic[9:])
    alone = alone._replace(next_request=np.array([-1], np.int32))
    tokens, answer = int(alone.input_tokens[0]), int(alone.output_tokens[0])
    outcome = simulate(alone, FleetPlan(1, RATES, FULL))
    wanted = 0.005 + 4e-5 * tokens + 1e-9 * tokens * tokens / 2
    assert outcome.ttft_s[0] == pytest.approx(wanted)
    reads = sum(tokens + step for step in range(answer - 1))
    steps = (answer - 1) * (0.01 + 1e-4) + 2e-8 * reads
    assert outcome.finish_s[0] - outcome.first_s[0] == pytest.approx(steps)


def test_compressed_sessions_stay_where_full_ones_are_evicted_and_the_tier_restores_the_rest():
    described = Description(sessions=60, sessions_per_s=2.0, turns=5, context_tokens=4000)
    traffic = make_traffic(described, 3)
    # The caches have the same memory.
    tight = [replace(cache, slots=60_000) for cache in (FULL, QUARTER, CODED)]
    tiered = replace(tight[1], policy="kvtier-tier", tier_tokens=10**7)
    full, quarter, coded, both = (
        simulate(traffic, FleetPlan(1, RATES, cache)) for cache in (*tight, tiered)
    )
    assert quarter.resident_sessions > 1.5 * full.resident_sessions
    assert quarter.hit_device.sum() > 1.2 * full.hit_device.sum()
    assert coded.evicted_tokens < 0.8 * quarter.evicted_tokens
    assert coded.hit_device.sum() > quarter.hit_device.sum()
    assert both.hit_tier.sum() > 0
    assert (both.hit_device + both.hit_tier).sum() > quarter.hit_device.sum()


@pytest.mark.parametrize(("share", "windows"), [(0.25, 1), (0.1, 4)])
def test_users_of_one_prompt_compute_a_window_once_and_hold_the_prompt_once(share, windows):
    described = Description(
        sessions=8, sessions_per_s=0.01, turns=1, shared_tokens=4000, context_tokens=700,
        output_tokens=20,
    )  # fmt: skip
    traffic = make_traffic(described, 0)
    cache = replace(QUARTER, retention=share, windows=Windows())
    outcome, full = (
        simulate(traffic, FleetPlan(1, RATES, one)) for one in (cache, replace(FULL, slots=10**6))
    )
    computed = traffic.input_tokens - outcome.hit_device
    more = np.sort(computed - (traffic.input_tokens - full.hit_device))
    assert more.tolist() == [0] * 7 + [64 * windows]
    profile = simulate(traffic, FleetPlan(1, RATES, replace(cache, ca_share=0.5)))
    assert (profile.hit_device < 4000).sum() >= 2


def test_affinity_keeps_a_session_in_place_and_round_robin_does_not():
    traffic = make_traffic(Description(sessions=40, turns=5), 1)
    kept = simulate(traffic, FleetPlan(4, RATES, replace(FULL, slots=10**7)))
    spread = simulate(
        traffic, FleetPlan(4, RATES, replace(FULL, slots=10**7), routing="round-robin")
    )
    for session in range(traffic.num_sessions):
        assert len(set(kept.replica[traffic.session == session])) == 1
    assert kept.hit_device.sum() > spread.hit_device.sum()


def test_what_fits_no_replica_is_refused_or_compressed_as_it_comes():
    traffic = make_traffic(Description(sessions=30, turns=2, context_tokens=2000), 5)
    full = simulate(traffic, FleetPlan(1, RATES, replace(FULL, slots=3000)))
    fits = traffic.input_tokens + traffic.output_tokens - 1 <= 3000
    assert (full.refused == ~fits).all()
    assert full.refused.any()
    tight = replace(QUARTER, slots=3000)
    small, large = (
        simulate(traffic, FleetPlan(1, RATES, tight, chunk_tokens=chunk)) for chunk in (512, 8192)
    )
    longest = traffic.input_tokens > 3000
    fits = traffic.input_tokens / 4 + 2 * 512 < 2500
    assert not small.refused[longest & fits].any()
    # In one chunk nothing can be compressed.
    assert large.refused[longest].any()
    never = replace(tight, compress_prefill="never")
    refused = simulate(traffic, FleetPlan(1, RATES, never, chunk_tokens=512)).refused
    assert refused.sum() > small.refused.sum()
    for outcome in (full, small, large):
        check(outcome)


def test_a_request_that_waits_for_an_answer_comes_so_long_after_it():
    """Two requests of a session, the second of which was recorded while the first would run."""
    first = TraceRequest(0.0, 1024, 200, (1, 2), "a")
    second = TraceRequest(0.1, 1536, 5, (1, 2, 3), "a", delay_s=3.0)
    other = TraceRequest(0.2, 512, 5, (9,))
    traffic = traffic_of(Trace((first, second, other)))
    found = simulate(traffic, FleetPlan(1, RATES, FULL))
    assert found.arrived_s[[0, 2]] == pytest.approx([0.0, 0.2])
    assert found.arrived_s[1] == pytest.approx(found.finish_s[0] + 3.0)
    assert found.hit_device[1] >= 1024
    assert traffic.session.tolist() == [0, 0, 1]


def test_copies_share_nothing_and_come_later():
    traffic = traffic_of(make_trace(4))
    many = copies(traffic, 3, spread_s=10.0, seed=1)
    one, three = (
        simulate(each, FleetPlan(1, RATES, replace(FULL, slots=10**8))) for each in (traffic, many)
    )
    assert many.num_sessions == 3 * traffic.num_sessions
    assert three.hit_device.sum() <= 3 * one.hit_device.sum() * 1.001
    assert (np.diff(many.arrival_s.reshape(3, -1), axis=1) >= 0).all()


def test_the_longest_cached_prefix_first_hits_more_where_sessions_do_not_fit():
    """Thirty sessions at once, of which the replica holds three."""
    described = Description(
        sessions=30, sessions_per_s=100.0, turns=8, context_tokens=8000, turn_tokens=200,
        output_tokens=20, think_s=0.1, spread=0.1, max_tokens=20_000,
    )  # fmt: skip
    traffic = make_traffic(described, 3)
    first, longest = (
        simulate(traffic, FleetPlan(1, RATES, FULL, schedule_policy=policy))
        for policy in SCHEDULE_POLICIES
    )
    check(first)
    check(longest)
    assert longest.hit_device.sum() > 1.3 * first.hit_device.sum()


def test_a_fleet_that_cannot_be_is_refused_by_its_flag():
    with pytest.raises(UsageError, match="--max-running: expected at least 1"):
        FleetPlan(1, RATES, FULL, max_running=0)


def spread_out(turns: int, gap_s: float) -> Traffic:
    """One session whose turns come far apart, while what else comes makes room for itself."""
    block, requests = 512, []
    fresh = iter(range(1000, 10_000))
    ours: tuple[int, ...] = ()
    for turn in range(turns):
        at = turn * gap_s
        ours += tuple(next(fresh) for _ in range(4))
        requests.append(TraceRequest(at, block * len(ours), 1, ours))
        other = tuple(next(fresh) for _ in range(50))
        requests.append(TraceRequest(at + gap_s / 2, block * len(other), 1, other))
    return traffic_of(Trace(tuple(requests)), answers_continue=False)


def hits_from_tier(rates: Rates, turns: int, gap_s: float) -> list[bool]:
    """Return whether each of the session's turns after its first got something from the tier."""
    cache = replace(FULL, slots=26_000, tier_tokens=10**7)
    outcome = simulate(spread_out(turns, gap_s), FleetPlan(1, rates, cache))
    return (outcome.hit_tier[2::2] > 0).tolist()


def test_a_replica_loads_only_while_loading_is_measured_as_faster_than_computing():
    assert hits_from_tier(RATES, 8, 10.0) == [True] * 7
    slow = replace(RATES, tier_token_s=6e-5)
    # Once it is measured, nothing is loaded until the measurement is a minute old.
    assert hits_from_tier(slow, 9, 10.0) == [True, *[False] * 6, True]


def test_a_request_waits_for_the_tier_no_longer_than_computing_would_take():
    """The first request behind which something was computed knows what that takes."""
    late = replace(RATES, tier_latency_s=3.0)
    trace = spread_out(4, 10.0)
    cache = replace(FULL, slots=26_000, tier_tokens=10**7)
    outcome = simulate(trace, FleetPlan(1, late, cache))
    assert outcome.hit_tier.sum() == 0
    computing = simulate(trace, FleetPlan(1, RATES, replace(FULL, slots=26_000)))
    assert (outcome.ttft_s[2::2] < 2.5 * computing.ttft_s[2::2]).all()
    assert (outcome.ttft_s[2::2] > 1.5 * computing.ttft_s[2::2]).all()


def test_what_was_evicted_while_a_request_was_queued_comes_from_the_tier():
    """Its context is there when it comes, and it waits behind a request that evicts that."""
    ours, other = tuple(range(4)), tuple(range(100, 150))
    first = TraceRequest(0.0, 512 * len(ours), 1, ours)
    evicting = TraceRequest(10.0, 512 * len(other), 1, other)
    second = TraceRequest(10.001, 512 * 5, 1, (*ours, 50))
    traffic = traffic_of(Trace((first, evicting, second)), answers_continue=False)
    cache = replace(FULL, slots=26_000, tier_tokens=10**7)
    outcome = simulate(traffic, FleetPlan(1, RATES, cache, max_running=1))
    check(outcome)
    assert outcome.hit_device[2] + outcome.hit_tier[2] >= 512 * len(ours)
    assert outcome.hit_tier[2] > 0
