"""The radix cache that SGLang sees, and the tree below it."""
