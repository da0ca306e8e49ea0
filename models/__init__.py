"""The training and the measuring of the demo model in `models/kvtier-demo`."""
