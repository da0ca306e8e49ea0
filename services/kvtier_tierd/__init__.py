"""The tier service: exact KV of many contexts, kept outside of the GPU and served over gRPC.

Reading order:

    stores/base.py   what a store is: the interface of memory, disk and mooncake
    stores/lru.py    who holds how many bytes, and who goes first
    service.py       the RPCs of proto/kvtier/v1/tier.proto over a store
    server.py        listeners, TLS, health, metrics, draining
"""
