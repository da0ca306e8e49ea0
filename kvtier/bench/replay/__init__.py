"""The bench over recorded traffic: a trace's requests at their own times, under every policy.
`kvtier.bench.recorded` has its flags.

    schema.py     what a worker finds
    measure.py    prompts, sending requests, what is resident afterwards, hit rates and goodput
    table.py, page.py   what people see
"""
