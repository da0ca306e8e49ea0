"""SGLang's scheduler and detokenizer are forked where SGLang asks for them to be spawned.

A spawned process imports SGLang again, ten seconds of CPU each, which is most of what a server costs
a test. SGLang spawns because of CUDA; tests on a GPU are better off with what it asks for.
"""

import multiprocessing
import os

if not os.path.exists("/dev/nvidia0"):
    _set_start_method = multiprocessing.set_start_method

    def set_start_method(method: str, force: bool = False) -> None:
        _set_start_method("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = set_start_method
