"""The names and the contents of stored blobs.

keys, names     the name of a span of a context, and the names that a context's KV has payload
the bytes under a name, and their checksum
turns           how a context's turns were compressed: a record that is stored beside its KV
turn_rules      whether a server with our settings compresses turns like that
"""
