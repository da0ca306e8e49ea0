"""The RPCs of proto/kvtier/v1/tier.proto over one store."""
