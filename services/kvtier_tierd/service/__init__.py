"""The RPCs of proto/kvtier/v1/tier.proto over one store.

service         every RPC, and which part does it
calls           what every call goes through: whose it is, and what its errors become
requests        what requests of several calls say, checked
lookups         calls that move no payload
put_stream      payloads that arrive; `staging` has them until they are whole
get_stream      payloads that are sent
shared_memory   payloads that clients on the same host move themselves, under `leases`
near_data       refreshes that choose next to the data
verifying       whether a blob is what was put
"""
