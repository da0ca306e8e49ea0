"""Families of requests that begin with one fixed prefix, and requests of no family.

make_family("tools", seed=0)    a prefix, traces to build a memory from, requests to test it on
off_topic_requests(0, 40)       what the memory's gate should turn away
"""

from benchmarks.memory.families.family import FAMILIES, Family, Request, make_family
from benchmarks.memory.families.off_topic import off_topic_requests

__all__ = ["FAMILIES", "Family", "Request", "make_family", "off_topic_requests"]
