"""The limits of a client: how much of the service it may use at a time.

namespaces  who may call; transfers at a time, and bytes a second
budget      memory for payloads on their way
progress    how long a stream may stand still
"""
