"""Slot tables on the device, and how lists are dealt to programs."""
