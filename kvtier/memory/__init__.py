"""Prefix memories: what stands for a long fixed prefix that many requests begin with.

prefix ──> exact KV ──┐
traces ──> queries ───┴──> memory: attention states under query keys, and kept KV ──> card

traces.py       what real requests ask behind the prefix
collecting.py   the queries of traces, and what the prefix answered them
choosing.py     which KV of the prefix is kept, which heads look up
entries.py      queries grouped into entries
building.py     all of it together
prefixes.py     ways to hold a prefix, as the reference attends to them
measuring.py    what requests lose by each of them
card.py         what a memory costs, and what it was made for
storage.py      a memory's directory
cli.py          `kvtier memory`
"""
