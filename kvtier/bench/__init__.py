"""The bench: the same long multi-turn sessions on stock SGLang and on kvtier, side by side.

`python -m kvtier.bench --turns 5 --len 128k`; `--help` lists the rest.
"""
