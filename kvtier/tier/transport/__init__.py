"""How a client's calls and payloads get to a service and back.

channel                     gRPC channels, certificates, and whose socket it is
deadline                    when a call has to be over
landing                     the caller's buffers, checked as they are filled
shared_memory, lanes        the service's memory, mapped; copies in two threads
shared_gets                 gets from that memory
"""
