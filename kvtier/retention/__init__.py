"""What a context keeps: the locality rule, scorers and shares."""
