"""Prefix memories in the engine.

server.py       those of one scheduler, opened when its model is there
source.py       where they come from, the same for every rank
hooks.py        what SGLang's requests and schedulers are hooked with
bank.py         the memories that are loaded, on the device
assigning.py    which memory a request is answered from
passes.py       what a forward pass asks of them
lookups.py      how the lookups of a pass went
metrics.py      the same over requests, for Prometheus
requeueing.py   requests that no memory answers well
"""
