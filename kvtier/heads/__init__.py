"""Head profiles: which KV heads keep the whole context, and how that was found out."""
