"""The probes of a model, which learn which of its KV heads need the context."""
