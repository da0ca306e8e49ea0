"""Refreshes that choose next to the data: queries go to the tier, chosen entries come back.

messages    what both ends say
exact_kv    exact KV in stored spans, read in place, and what a refresh keeps of it
session     the engine's end
"""
