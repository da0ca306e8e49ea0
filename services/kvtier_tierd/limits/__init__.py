"""How much of the service a client may use at a time.

namespaces  who may call; transfers at a time, and bytes a second
budget      memory for payloads on their way
progress    how long a stream may stand still
"""
