"""The commands `kvtier calibrate` and `kvtier calibration`."""
