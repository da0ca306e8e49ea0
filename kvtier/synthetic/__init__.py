"""Texts made by rule, whose right answers are known: training, calibration and the benches hold
them with a model to see what it remembers.

    recall.py   the recall language: sessions of facts in filler, and questions about them
    words.py    its words
"""
