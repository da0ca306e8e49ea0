"""The progress that a user sees while a bench runs, and how far a prefill is."""
