"""What a context keeps: the locality rule and the arithmetic of the two pools."""
