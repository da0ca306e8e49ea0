"""The SGLang plugin: a radix cache, an attention backend and a pool, and what they are made of.

SGLang (the versions in versions.py) is extended through its own seams (entry points, registries,
hooks), never forked. A request's tokens meet the folders in this order:

    plugin.py       what is registered and hooked, and the start-up check that it took
    runtime.py      the one owner: makes every part below from the settings, and joins them
    radix/          the cache that SGLang sees (cache.py), over a tree of atomic nodes and variants
    compression/    what heads keep of a finished turn
    attention/      the attention backend over kvtier_kernels: lists, plans, warm-up
    pool/           the KV pool in pages of one head, who owns which slot, how many there are

The cache calls these two, and they call nothing above themselves:

    tier/           exact KV on its way to the tier and back, and what it is called there
    refresh/        entries chosen again, with the turn's own questions

And attention, cache and scheduler call this one:

    memory/         prefixes that memories stand for, and requests that begin with them

These two only look:

    status/         metrics, and the page that says what is kept and why
    tracing/        spans of a request's work, in SGLang's trace of it

Beside them: compat.py and requests.py (what is refused), request_options.py (what a request may ask
for), hooks.py, occupancy.py and metrics.py (what only observes), ranks.py and waits.py (what ranks
decide together, and wait for), streams.py (copies beside the engine's own streams), serve.py (the
command), platform.py (stock SGLang on any CPU). docs/architecture.md follows one turn through all
of this.
"""
