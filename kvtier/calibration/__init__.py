"""Calibration: curves from retention to quality, and the store that serves them to engines.

    curves       the curve, its inverse and its fit; evidence: what it was fitted to
    keys         the names of documents
    documents    curves, head profiles and published prefix memories as JSON, with what they were
                 measured on
    store        Redis, files, copies of what Redis had, and the watcher of a serving engine
    kept_shares  what a kept share of a context costs; measuring: the curve of a model
    cli          `kvtier calibrate`; store_cli: `kvtier calibration`

Each may import those above it, and none below.
"""
