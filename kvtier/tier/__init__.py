"""Exact KV outside of the engine: what it is called, how it gets there and back, how it is checked.

        prefetch             what the engine asks for: a prompt's KV
            ↓
          link               calls in the background that never fail and never wait long
            ↓
         client              calls to one service, each with a deadline
            ↓
        transport            the connection, streams, shared memory, and where payloads land
            ↓
      wire, blobs            what both ends agree on: messages and their framing; names, payloads
                             and records of turns

Each imports what is below it; the service (kvtier_tierd) imports `wire`, `blobs`, and how
certificates are renewed.
"""
