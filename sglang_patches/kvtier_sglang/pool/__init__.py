"""The KV pool: slots of tokens, and pages of one head."""
