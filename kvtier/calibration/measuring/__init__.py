"""What a kept share costs: contexts to measure on, the measurements, and the curve."""
