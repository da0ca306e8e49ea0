"""Prefix memories by name: what operators publish in the calibration store, for all servers.

publishing.py   what is published, and what no longer is
places.py       where the memories of a server are: in a folder, or where the store says
cli.py          `kvtier memory publish`, `list` and `withdraw`
"""
