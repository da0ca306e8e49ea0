"""The stores of calibration documents: Redis, or files, and copies of what Redis had."""
