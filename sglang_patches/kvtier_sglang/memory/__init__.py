"""Prefix memories in the engine.

bank.py       the memories that are loaded, on the device
assigning.py  which memory a request begins with; requests that leave theirs
passes.py     what a forward pass asks of them
"""
