"""The SGLang plugin: platform, head-split pools, radix tree, attention backend.

SGLang 0.5.23 is extended through its own seams (entry points, registries, hooks), never
forked. Reading order:

    plugin.py      what is registered and hooked, and the start-up check that it took
    requests.py    requests that are refused with a 400
    pool.py        the head-split KV pool: two slot spaces, one per head class
    allocator.py   which slots are free, and the map from CA slot to locality slot
    variants.py    a radix tree with nodes that cannot be cut, and variants of them
    radix.py       ... whose nodes are compressed when their turn ends
    budget.py      admission that counts both pools
    attention.py   the attention backend over kvtier_kernels
    graphs.py      what CUDA graphs record of it
    spans.py       between the pool's slots and a tier's payloads
    streams.py     copies and background work beside the engine's own streams
    spill.py       exact KV on its way to the tier
    restore.py     a tree that takes exact KV back
    tiered.py      the tree with a tier behind it: asking, restoring, spilling; with it
                   load_flows.py (requests that wait for the tier)
    refresh.py     CA entries chosen again, with the turn's own questions; with it
                   refresh_flows.py (waiting for the tier), refresh_sources.py (who chooses) and
                   refresh_again.py (while a turn is generated)
    build.py       the tree that the settings ask for
    platform.py    stock SGLang on any CPU
"""
