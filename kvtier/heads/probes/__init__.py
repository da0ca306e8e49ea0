"""What a model is asked in order to learn which of its KV heads need the context."""
