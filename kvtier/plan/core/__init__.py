"""The simulator's inner loop, compiled by numba.

A fleet of 10,000 replicas serving a million sessions is some 10^8 steps. Libraries of discrete
events in Python (simpy and its like) take microseconds for each of their events, and more for the
work in it. numba comes with SGLang and compiles these loops to machine code. They stay Python that
a debugger can enter (`NUMBA_DISABLE_JIT=1`).

All state is in arrays, one table a concern; functions change them and own nothing.

    compiled.py  the decorator that compiles these files, and the folder of their machine code
    state.py     the state: fleet, requests, units of cache, replicas, tier
    clocks.py    a tree over numbers that knows the least of them
    units.py     slots and recency of a replica's cached units
    radix.py     matching, cutting and growing a replica's radix tree
    turns.py     a request's KV when its prompt is computed, and when its turn ends
    tiering.py   exact KV in the tier, and fetching it
    measured.py  a replica's measured rates of computing and loading
    replica.py   one replica's scheduler: admission, chunked prefill, decoding
    routing.py   the choice of a replica for a request
    loop.py      arrivals and replicas in the order of time
"""
