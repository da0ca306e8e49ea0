"""Where calibration documents are kept: Redis, an embedded server, copies on disk."""
