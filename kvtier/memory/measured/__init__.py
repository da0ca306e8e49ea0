"""The cost of a memory: losses of requests (losses.py), bytes (sizes.py), the rows of a card beside
other ways to hold the prefix (rows.py), and requests that have nothing to do with it
(off_topic.py)."""
