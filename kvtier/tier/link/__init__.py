"""The engine's side of its tier: calls in the background that never fail and never wait long.

link     two queues and their threads; the budget of host memory
calls    calls that fail as misses, and probes of a tier that is away
breaker  whether the tier is called at all
queues   fetches, and puts
"""
