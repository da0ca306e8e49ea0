"""Scores of tokens: window mass, and what the newest queries look for."""
