"""The addresses of the services that kvtier talks to, parsed: settings need no more of them.

tier.py     of a tier: `default`, unix:/path or host:port
redis.py    of a calibration store: redis://, rediss:// or unix://
"""
