"""Slot tables on the device, and how decoding over them is cut."""
