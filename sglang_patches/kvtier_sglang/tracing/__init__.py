"""Spans of what kvtier does for a request, in the trace that SGLang makes of it (`--enable-trace`).

    tracer.py       SGLang's tracer, where it traces, and the span that a request is in
    instrument.py   a cache and its parts, wrapped so that their work becomes spans

    Req ─ Scheduler ─┬─ kvtier.match                         what the tree has of the prompt
                     ├─ kvtier.fetch ─ kvtier.v1.TierService/Get ═══ the tier's own span
                     ├─ kvtier.restore                       what came is written into the pool
                     ├─ kvtier.refresh                       entries chosen again, in the pass
                     ├─ kvtier.spill ── kvtier.v1.TierService/Put ═══ the tier's own span
                     └─ kvtier.select                        what the ended turn keeps

Without `--enable-trace` nothing is wrapped, and no library of spans is imported. No span holds
tokens or texts.
"""
