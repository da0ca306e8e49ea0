"""Traffic: requests with their arrival times, and which of them share a prefix.

    trace.py           requests of a file in Mooncake's open format; scaling them to a machine
    continuations.py   the requests that continue earlier ones, as far as blocks tell
    prefixes.py        traffic as arrays over one tree of prefixes, which is what is simulated
    described.py       traffic that is described instead of recorded: sessions, turns, think times
    lru.py             hit rates of an LRU cache of any size, by stack distances

The bench replays traces on a real engine, and `kvtier plan` simulates them.
"""
