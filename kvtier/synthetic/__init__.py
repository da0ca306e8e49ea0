"""Texts made by rule, whose right answers are known: training, calibration and the benches hold
them with a model to see what it remembers.

    script.py         what is said in a session: the interface of a workload
    recall.py         the recall language: sessions of facts in filler, and questions about them
    words.py          its words; recall_script.py: its sessions as a script
    text.py           codes hidden in prose, for any tokenizer
    standard_library.py, frame.py, tokenizer.py   the prose, what stands around messages, and the
                      tokenizer
"""
