"""Calibration: curves from retention to quality, and the store that serves them to engines."""
