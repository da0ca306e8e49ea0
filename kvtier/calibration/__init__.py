"""Calibration: curves from retention to quality, and the store that serves them to engines.

    curves       the curve, its inverse and its fit
    documents    curves, head profiles and published prefix memories as JSON, with what they were
                 measured on, and their keys
    store        Redis, files, copies of what Redis had, and the watcher of a serving engine
    measuring    contexts, what a kept share of them costs, and the curve of a model
    cli          `kvtier calibrate` and `kvtier calibration`

Each may import those above it, and none below.
"""
