"""The stores of blobs.

base        the interface of every store
lru         the accounting under stores of a bounded size: what is held, and what is evicted first
arena       one large stretch of memory, which clients on the same host may map
memory      blobs in an arena
disk        blobs in files, with an index
layered     memory in front of a disk
mooncake    the memory of several services as one
"""
