"""Calibration samples: contexts, and questions about them whose answers are known."""
