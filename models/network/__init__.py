"""The demo model's network in plain torch: its layers, exact attention, and long contexts."""
