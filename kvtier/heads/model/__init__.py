"""The model that is calibrated: what its configuration says, and its weights, loaded."""
