"""The bench over recorded traffic: a trace's requests at their own times, under every policy.
`kvtier.bench.recorded` has its flags and its prompts.

    schema.py     what a worker finds
    measure.py    sending requests, and what is resident afterwards
    metrics.py    percentiles, hit rates, goodput
    table.py, page.py   what people see
"""
