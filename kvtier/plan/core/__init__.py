"""The simulator's inner loop, compiled by numba.

A fleet of 10,000 replicas serving a million sessions is some 10^8 steps; libraries of discrete
events in Python (simpy and its like) take microseconds for each of their events and more for what
is done in it. numba comes with SGLang, compiles these loops to machine code, and they stay Python
that a debugger can enter (`NUMBA_DISABLE_JIT=1`).

All state is in arrays, one NamedTuple a concern; functions change them and own nothing.

    compiled.py  how these files are compiled, and where the code is kept
    state.py     what there is: fleet, requests, units of cache, replicas, tier
    clocks.py    a tree over numbers that knows the least of them
    units.py     slots and recency of what one replica caches
    radix.py     matching, cutting and growing a replica's radix tree
    turns.py     what a request publishes, and what becomes of it when its turn ends
    tiering.py   exact KV in the tier, and fetching it
    replica.py   one replica's scheduler: admission, chunked prefill, decoding
    routing.py   which replica a request goes to
    loop.py      arrivals and replicas in the order of time
"""
