"""One replica's scheduler, a model of SGLang's.

New prompts go before decoding, in chunks of `chunk` tokens. They are admitted first come first
served (`fcfs`) or longest cached prefix first (`lpm`); a request that waits for the tier does not
hold up those behind it.

    prefill pass   base + request * requests that begin in it
                   + token * new tokens + pair * (new tokens x entries that they attend to)
    decode step    base + request * batch + token * tokens that the batch reads

A pass of either kind is one event, and so are all decode steps up to the next one that changes the
batch. Slots for a whole answer are taken when its request is admitted, so nothing is retracted.
"""

from __future__ import annotations

import math

from kvtier.plan.core import clocks
from kvtier.plan.core.compiled import compiled
from kvtier.plan.core.measured import computed, loaded
from kvtier.plan.core.radix import set_path, walk
from kvtier.plan.core.state import (
    ALWAYS,
    AUTO,
    DECODING,
    IDLE,
    NONE,
    PREFILLING,
    WAITING,
    Asked,
    Fleet,
    World,
)
from kvtier.plan.core.tiering import fetch, restore, spill
from kvtier.plan.core.turns import end_turn, publish, retention_of, streamed_slots
from kvtier.plan.core.units import lock_path, reserve, unlock_path

ADMITTED, NO_ROOM, NEVER_FITS = 0, 1, 2


@compiled
def enqueue(world: World, replica: int, request: int) -> None:
    """Put a request into the queue, behind all others that wait."""
    requests, replicas = world.requests, world.replicas
    requests.follows[request] = NONE
    if replicas.queue_first[replica] == NONE:
        replicas.queue_first[replica] = request
    else:
        requests.follows[replicas.queue_last[replica]] = request
    replicas.queue_last[replica] = request


@compiled
def _dequeue(world: World, replica: int, before: int, request: int) -> None:
    requests, replicas = world.requests, world.replicas
    after = requests.follows[request]
    if before == NONE:
        replicas.queue_first[replica] = after
    else:
        requests.follows[before] = after
    if replicas.queue_last[replica] == request:
        replicas.queue_last[replica] = before


@compiled
def start(world: World, traffic: Asked, fleet: Fleet, replica: int, now_s: float) -> None:
    """Begin the replica's next pass, and set its next event to the end of that."""
    replicas = world.replicas
    replicas.phase_began_s[replica] = now_s
    took_s = _start_prefill(world, traffic, fleet, replica, now_s)
    if replicas.num_batch[replica] > 0:
        replicas.phase[replica] = PREFILLING
        clocks.put(world.events, replica, now_s + took_s)
        return
    ready_s = _next_ready(world, replica, now_s)
    if replicas.num_running[replica] > 0:
        replicas.phase[replica] = DECODING
        replicas.phase_steps[replica] = _steps_to_next_end(world, replica)
        clocks.put(world.events, replica, now_s + decode_s(world, fleet, replica))
        if ready_s < math.inf:
            stop_decoding_at(world, fleet, replica, ready_s)
        return
    replicas.phase[replica] = IDLE if ready_s == math.inf else WAITING
    clocks.put(world.events, replica, ready_s)


@compiled
def _next_ready(world: World, replica: int, now_s: float) -> float:
    """Return the time when the next request that waits for the tier goes on; infinite where none
    waits."""
    request, next_s = world.replicas.queue_first[replica], math.inf
    while request != NONE:
        if world.requests.ready_s[request] > now_s:
            next_s = min(next_s, world.requests.ready_s[request])
        request = world.requests.follows[request]
    return next_s


@compiled
def _steps_to_next_end(world: World, replica: int) -> int:
    replicas, requests = world.replicas, world.requests
    nearest = requests.target[world.running[replica, 0]]
    for place in range(1, replicas.num_running[replica]):
        nearest = min(nearest, requests.target[world.running[replica, place]])
    return nearest - replicas.steps[replica]


@compiled
def _some_steps_s(world: World, fleet: Fleet, replica: int, steps: int) -> float:
    """Return the time in s of so many decode steps, each of which reads a token more per request
    than the one before."""
    replicas = world.replicas
    batch = replicas.num_running[replica]
    first_s = fleet.decode_base_s + fleet.decode_request_s * batch
    first_s += fleet.decode_token_s * replicas.reads[replica]
    return steps * first_s + fleet.decode_token_s * batch * steps * (steps - 1) / 2


@compiled
def decode_s(world: World, fleet: Fleet, replica: int) -> float:
    """Return the time in s that the decode steps under way take together."""
    return _some_steps_s(world, fleet, replica, world.replicas.phase_steps[replica])


@compiled
def stop_decoding_at(world: World, fleet: Fleet, replica: int, when_s: float) -> None:
    """Let the decode steps under way end with the one that is running at `when_s`."""
    replicas = world.replicas
    began_s = replicas.phase_began_s[replica]
    low, high = 1, replicas.phase_steps[replica]
    while low < high:
        middle = (low + high) // 2
        if began_s + _some_steps_s(world, fleet, replica, middle) >= when_s:
            high = middle
        else:
            low = middle + 1
    replicas.phase_steps[replica] = low
    clocks.put(world.events, replica, began_s + decode_s(world, fleet, replica))


@compiled
def _start_prefill(world: World, traffic: Asked, fleet: Fleet, replica: int, now_s: float) -> float:
    """Fill a prefill batch. Returns the time in s that its pass takes."""
    requests, replicas = world.requests, world.replicas
    replicas.num_batch[replica] = 0
    room = fleet.chunk
    took_s = fleet.prefill_base_s
    request = replicas.chunked[replica]
    if request != NONE:
        took_s += _take_chunk(world, traffic, fleet, replica, request, room)
        room -= requests.chunk[request]
    while room > 0:
        if replicas.num_running[replica] + replicas.num_batch[replica] >= fleet.max_running:
            break
        before, request = _next_waiting(world, traffic, fleet, replica, now_s)
        if request == NONE:
            break
        if fleet.tier_tokens > 0 and _asks_again(world, traffic, fleet, replica, request, now_s):
            continue
        outcome = _admit(world, traffic, fleet, replica, request, now_s)
        if outcome == NO_ROOM:
            break
        _dequeue(world, replica, before, request)
        if outcome == NEVER_FITS:
            leave(world, traffic, fleet, replica, request, now_s)
        else:
            took_s += fleet.prefill_request_s
            took_s += fleet.prefill_prompt_token_s * traffic.asks.input_tokens[request]
            took_s += _take_chunk(world, traffic, fleet, replica, request, room)
            room -= requests.chunk[request]
    return took_s


@compiled
def _next_waiting(
    world: World, traffic: Asked, fleet: Fleet, replica: int, now_s: float
) -> tuple[int, int]:
    """Return the next request to admit, behind the one before it in the queue; NONE where there is
    none."""
    requests = world.requests
    found, found_before, longest = NONE, NONE, -1
    before, request = NONE, world.replicas.queue_first[replica]
    while request != NONE:
        if requests.ready_s[request] <= now_s:
            if not fleet.longest_first:
                return before, request
            set_path(world, traffic, traffic.asks.node[request])
            limit = traffic.asks.input_tokens[request] - 1
            _, hit = walk(world, traffic, fleet, replica, limit, False, False)
            if hit > longest:
                found, found_before, longest = request, before, hit
        before, request = request, requests.follows[request]
    return found_before, found


@compiled
def _asks_again(
    world: World, traffic: Asked, fleet: Fleet, replica: int, request: int, now_s: float
) -> bool:
    """Ask the tier once more for a request that lost some of its prefix while it was queued. Return
    whether it waits for that now."""
    requests = world.requests
    set_path(world, traffic, traffic.asks.node[request])
    limit = traffic.asks.input_tokens[request] - 1
    _, hit = walk(world, traffic, fleet, replica, limit, False, False)
    if max(hit, _landed(world, request, hit, now_s)) >= requests.cached[request]:
        return False
    fetch(world, traffic, fleet, request, hit, now_s)
    return requests.ready_s[request] > now_s


@compiled
def _landed(world: World, request: int, hit: int, now_s: float) -> int:
    """Return the end of what has come from the tier behind the tokens that are hit; 0 for
    nothing."""
    requests = world.requests
    if requests.lands_s[request] > now_s or hit < requests.fetched[request]:
        return 0
    return requests.landed[request]


@compiled
def _take_chunk(
    world: World, traffic: Asked, fleet: Fleet, replica: int, request: int, room: int
) -> float:
    """Put a request's next tokens into the batch, as many as fit. Returns the time in s that they
    take."""
    requests, replicas = world.requests, world.replicas
    before = requests.reads[request] - requests.left[request]
    tokens = min(room, requests.left[request])
    requests.left[request] -= tokens
    requests.chunk[request] = tokens
    world.batch[replica, replicas.num_batch[replica]] = request
    replicas.num_batch[replica] += 1
    replicas.chunked[replica] = request if requests.left[request] > 0 else NONE
    took_s = fleet.prefill_token_s * tokens
    took_s += fleet.prefill_pair_s * tokens * (before + tokens / 2)
    if requests.restored[request] > 0:
        took_s += fleet.tier_write_token_s * requests.restored[request]
        requests.restored[request] = 0
    return took_s


@compiled
def _admit(
    world: World, traffic: Asked, fleet: Fleet, replica: int, request: int, now_s: float
) -> int:
    """Match a request's prefix, take slots for the rest and restore the KV that has come from the
    tier by now. Returns ADMITTED, NO_ROOM or NEVER_FITS."""
    requests, replicas = world.requests, world.replicas
    tokens, answer = traffic.asks.input_tokens[request], traffic.asks.output_tokens[request] - 1
    set_path(world, traffic, traffic.asks.node[request])
    unit, hit = walk(world, traffic, fleet, replica, tokens - 1, False, True)
    lock_path(world, unit)
    wanted = tokens - hit + answer
    restored = max(0, _landed(world, request, hit, now_s) - hit)
    fits = wanted < fleet.slots - _read_tokens(world, unit)
    # Computed tokens are compressed as they come; tokens from the tier are there at once.
    streams = fleet.streams == ALWAYS and restored == 0
    streams = streams or (fleet.streams >= AUTO and not fits)
    requests.streams[request] = streams
    if streams:
        restored = 0
        retention = retention_of(world, fleet, traffic.asks.node[request])
        wanted += streamed_slots(fleet, tokens - hit, retention) - (tokens - hit)
    alone = replicas.num_running[replica] + replicas.num_batch[replica] == 0
    in_flight = replicas.used[replica] - replicas.evictable[replica] + wanted
    waits = not alone and in_flight > fleet.in_flight_slots
    if waits or not reserve(world, fleet, replica, wanted):
        unlock_path(world, unit)
        if not alone:
            return NO_ROOM
        requests.refused[request] = True
        return NEVER_FITS
    requests.reserved[request] = wanted
    if restored > 0:
        unit = restore(world, traffic, fleet, unit, request)
        requests.reserved[request] -= restored
        token_s = fleet.tier_token_s + fleet.tier_write_token_s
        took_s = fleet.tier_latency_s + restored * token_s
        loaded(world, replica, restored, took_s, now_s)
    requests.hit_device[request], requests.hit_tier[request] = hit, restored
    requests.restored[request] = restored
    requests.anchor[request], requests.left[request] = unit, tokens - hit - restored
    requests.reads[request] = _read_tokens(world, unit) + requests.left[request]
    return ADMITTED


@compiled
def _read_tokens(world: World, unit: int) -> float:
    """Return the length of the path to a unit as attention reads it, in tokens of full KV."""
    units, slots = world.units, 0
    root = units.replica[unit]
    while unit != root:
        slots += units.slots[unit]
        unit = units.parent[unit]
    return float(slots)


@compiled
def finish_prefill(world: World, traffic: Asked, fleet: Fleet, replica: int, now_s: float) -> None:
    """End a prefill pass: prompts that are complete have their first token."""
    requests, replicas = world.requests, world.replicas
    for place in range(replicas.num_batch[replica]):
        request = world.batch[replica, place]
        computed(world, replica, requests.chunk[request], now_s - replicas.phase_began_s[replica])
        if requests.left[request] > 0:
            continue
        requests.first_s[request] = now_s
        publish(world, traffic, fleet, request)
        if traffic.asks.output_tokens[request] == 1:
            finish(world, traffic, fleet, replica, request, now_s)
            continue
        world.running[replica, replicas.num_running[replica]] = request
        replicas.num_running[replica] += 1
        replicas.reads[replica] += requests.reads[request]
        answer = traffic.asks.output_tokens[request] - 1
        requests.target[request] = replicas.steps[replica] + answer
    replicas.num_batch[replica] = 0


@compiled
def finish_decoding(world: World, traffic: Asked, fleet: Fleet, replica: int, now_s: float) -> None:
    """End the decode steps under way, and the answers that are complete with them."""
    requests, replicas = world.requests, world.replicas
    steps = replicas.phase_steps[replica]
    replicas.steps[replica] += steps
    replicas.reads[replica] += steps * replicas.num_running[replica]
    place = 0
    while place < replicas.num_running[replica]:
        request = world.running[replica, place]
        if requests.target[request] > replicas.steps[replica]:
            place += 1
            continue
        replicas.num_running[replica] -= 1
        world.running[replica, place] = world.running[replica, replicas.num_running[replica]]
        read = requests.reads[request] + traffic.asks.output_tokens[request] - 1
        replicas.reads[replica] -= read
        finish(world, traffic, fleet, replica, request, now_s)


@compiled
def finish(
    world: World, traffic: Asked, fleet: Fleet, replica: int, request: int, now_s: float
) -> None:
    """Complete an answer. The session's next turn, where it waits for that, comes a think time
    later."""
    world.requests.finish_s[request] = now_s
    end_turn(world, traffic, fleet, request)
    if fleet.tier_tokens > 0:
        spill(world, traffic, fleet, request, now_s)
    leave(world, traffic, fleet, replica, request, now_s)


@compiled
def leave(
    world: World, traffic: Asked, fleet: Fleet, replica: int, request: int, now_s: float
) -> None:
    """Let a request leave its replica, and note when the turn that waits for its end comes."""
    replicas = world.replicas
    replicas.outstanding[replica] -= 1
    clocks.put(world.loads, replica, float(replicas.outstanding[replica]))
    later = traffic.asks.next_request[request]
    if later != NONE:
        session = traffic.asks.session[later]
        world.waiting[session] = later
        clocks.put(world.waits, session, now_s + traffic.asks.think_s[later])
    if fleet.hinted and not math.isnan(world.away_s[request]):
        world.hints.priority[traffic.asks.session[request]] = -(now_s + world.away_s[request])
