"""The way of a client's calls and payloads to a service and back.

connection     a gRPC channel in use, its certificates, and calls whose failures are TierErrors
landing        the caller's buffers, checked as they are filled
streams        payloads in chunks, to any service and from any
shared_memory  the service's memory, mapped
shared         payloads into that memory and out of it, copied in two threads
tracing        spans of calls
"""
