"""Prefix memories: what stands for a long fixed prefix that many requests begin with.

prefix ──> exact KV ──┐
traces ──> queries ───┴──> memory: attention states under query keys, and kept KV ──> card

traces.py       what real requests ask behind the prefix
prefixes.py     ways to hold a prefix, as the reference attends to them
collecting.py   the queries of traces, and what the prefix answered them
entries.py      queries grouped into entries
recipe.py       how a memory is made
building.py     a memory of what was collected
measured.py     what it costs, beside other ways
card.py         what it was made for
storage.py      its directory, with its card
making.py       all of it, from files to files
published.py    memories by name in the calibration store, for all servers, or in a folder
cli.py          `kvtier memory`
"""
