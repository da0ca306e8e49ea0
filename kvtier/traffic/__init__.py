"""Traffic: which requests come when, and which of them begin alike.

    trace.py           requests of a file in Mooncake's open format; scaling them to a machine
    continuations.py   which request goes on with which, as far as blocks tell
    prefixes.py        traffic as arrays over one tree of prefixes, which is what is simulated
    described.py       traffic that is described instead of recorded: sessions, turns, think times
    lru.py             what a cache of any size would hit, by stack distances

The bench replays traces on a real engine, and `kvtier plan` simulates them.
"""
