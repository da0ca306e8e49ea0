"""What the tier has of a prompt, fetched in the background into host memory.

lookup      which spans are worth fetching, and what can be made of those that landed
host        spans in host memory
"""
