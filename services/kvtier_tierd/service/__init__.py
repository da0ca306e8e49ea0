"""The RPCs of proto/kvtier/v1/tier.proto over one store.

service         the servicer; RPCs that move no payload are done here
calls           what every call goes through: whose it is, and what its errors become
requests        parts of several calls: what they say, checked, and whether a blob is what was put
streams         payloads in chunks, sent and received
shared_memory   payloads that clients on the same host move themselves, under `leases`
"""
