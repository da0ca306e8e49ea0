"""The bench: the same long multi-turn sessions on stock SGLang and on kvtier, side by side.

`python -m kvtier.bench --turns 5 --len 128k`; `--help` lists the rest.

    options, planning/   flags, and what they mean for a model: pool, profiles, engine arguments
    runner, worker       a process per policy
    workload, measure    what is asked, and asking it, and how likely right answers were
    recorded, replay/    a trace's requests instead of such sessions
    schema, metrics      the documents, and the arithmetic on them
    table, report/, progress   what people see
"""
