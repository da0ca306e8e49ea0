"""The rules of retention: the locality rule, scorers and shares."""
