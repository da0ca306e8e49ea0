"""The outcome as one HTML page and its charts; the terminal's tables are in `table.py`."""
