"""The store `disk`: blobs that survive the service.

store       what it is told, what is served and what is evicted
writer      one thread that writes, several commits at a time
medium      the directory: an index and a file per blob
index       the rows of the index
"""
