"""The tier service: exact KV of many contexts, kept outside of the GPU and served over gRPC.

cli, options    the command `kvtier tier`, and what it is told
server          one service from its start to its orderly end
service         the RPCs of proto/kvtier/v1/tier.proto over a store
listening       who may connect: unix sockets, TLS
decoding        requests that are no messages
monitoring      metrics, and the HTTP server that answers probes
stores          where blobs are kept: memory, disk, both, Mooncake
limits          how much a client may ask of the service at a time
"""
