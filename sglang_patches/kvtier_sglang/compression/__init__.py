"""What is kept of a context when its turn ends."""
