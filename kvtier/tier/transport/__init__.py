"""The way of a client's calls and payloads to a service and back.

channel                     gRPC channels, certificates, and whose socket it is
connection                  a channel in use: calls whose failures are TierErrors
deadline                    when a call has to be over
landing                     the caller's buffers, checked as they are filled
streams                     payloads in chunks, to any service and from any
shared_memory, lanes        the service's memory, mapped; copies in two threads
shared_puts, shared_gets    payloads into that memory and out of it
"""
