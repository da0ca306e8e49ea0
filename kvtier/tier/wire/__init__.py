"""The conventions of both ends of a connection besides the messages of proto/kvtier/v1/tier.proto.

protocol    the version, limits of messages, and how memory is shared
framing     chunks of payload without a message around them
status      errors and the gRPC status codes that stand for them
"""
