"""The store `mooncake`: Mooncake Store, the memory of several services as one.

store       blobs as Mooncake's objects
link        its C++ client, called with deadlines
segments    segments of other services that could not be read from
"""
