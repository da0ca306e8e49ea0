"""The bench over recorded traffic: a trace's requests at their own times, under every policy.

options.py    flags; trace.py of kvtier.traffic reads the file
schema.py     what a worker is told, and what it finds
prompts.py    block ids as tokens
measure.py    sending them, and what is resident afterwards
metrics.py    percentiles, hit rates, goodput
table.py, page.py   what people see
"""
