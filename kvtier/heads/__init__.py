"""Head profiles: which KV heads keep the whole context, and how that was found out.

    profile      what is found: per layer, the context-anchored heads
    model        configuration and weights of the model
    samples      contexts, and questions about them whose answers are known
    reference    what the engine does, said simply: sessions and compaction on a transformers model
    probes       what a model is asked: its answers when only some heads see the middle of a context
    methods      which heads, by which scores: one file each, and the registry
    calibrate    samples, methods, verification, profile; with its command, reports and pictures

Each may import those above it, and none below.
"""
