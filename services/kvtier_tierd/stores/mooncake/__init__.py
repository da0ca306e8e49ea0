"""The store `mooncake`: Mooncake Store, the memory of several services as one.

store       a blob as one object; which objects are there, and what this service has put
options     what a service says of its Mooncake
link        its C++ client, called with deadlines
segments    segments of other services that could not be read from
"""
