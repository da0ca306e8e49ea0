"""The backend `triton`. Launchers check and prepare in Python, the kernels are compiled:

    launching.py   how any kernel is started, and what this device is
    kernels.py     attention, the contract's face; its plans in plans.py
                   -> decode.py, extend.py, merge.py, and for plans schedule.py, tables.py
    scores.py      window mass                        -> mass.py
    merging.py     where dropped entries go           -> nearest.py
    bins.py        sums over the entries of a bin     -> segments.py
    prediction.py  logits that later queries may have -> newest.py
    entries.py     tiles of keys, values and votes, and softmax.py what is computed of them
    ahead.py       compiles all of it for a GPU that is not there

Run `ahead` after changing a kernel: it says whether its loops still keep to the registers.
"""
