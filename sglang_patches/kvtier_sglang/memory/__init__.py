"""Prefix memories in the engine.

server.py       those of one scheduler, opened when its model is there
source.py       where they come from, the same for every rank
hooks.py        what SGLang's requests and schedulers are hooked with; which memory answers which
bank.py         the memories that are loaded, on the device
passes.py       what a forward pass asks of them, and how its lookups went
requeueing.py   requests that no memory answers well
"""
