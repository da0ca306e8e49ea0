"""Exact KV outside of the engine: what it is called, how it gets there and back, how it is checked.

Reading order:

    keys, names      what a span of a context is called, and which names a context's KV has
    blob, turns      the bytes under a name, and their checksum; how turns were compressed
    turn_rules       whether a server with our settings compresses turns like that
    client           calls to one service; address, channel, protocol, status, landing, shared are
                     its parts
    breaker, link    what an engine holds of its tier: calls that never fail and never wait long
    host, lookup     what the tier has of a prompt, fetched into host memory
"""
