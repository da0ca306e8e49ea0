"""Where calibration documents are kept: Redis, or files, and copies of what Redis had."""
