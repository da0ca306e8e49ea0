"""The network side of the service: how clients reach it.

sockets     unix sockets that only this user opens
tls         certificates that can be renewed while the service runs
decoding    requests that are no messages
"""
