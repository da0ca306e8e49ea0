"""The operators' view of a server: Prometheus metrics, and a page that says what is kept and why.

    figures.py     counters and gauges, each described once, for the metrics and the page alike
    publisher.py   figures on SGLang's own `/metrics`, once a second
    sessions.py    the branches of the radix tree: what is kept, why, and what the tier has
    state.py       a scheduler's answer to the page's question, over SGLang's internal state
    page.py        that answer as HTML, with session_table.py
    routes.py      `/kvtier/status` and `/kvtier/status.json`

Nothing here holds or shows tokens, texts, cache salts or extra keys.
"""
