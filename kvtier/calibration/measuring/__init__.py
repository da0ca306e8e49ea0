"""The cost of a kept share: contexts to measure on, the measurements, and the curve."""
