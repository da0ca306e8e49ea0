"""The part of a prompt that the tier has, fetched in the background into host memory.

lookup      which spans are worth fetching, and what can be made of those that landed
host        spans in host memory
"""
