"""SGLang's scheduler and detokenizer are forked where SGLang asks for them to be spawned.

A spawned process imports SGLang again, which takes ten seconds of CPU and is most of what a server
costs a test. SGLang spawns because of CUDA; where there is a GPU, tests leave that as it is.
"""

import multiprocessing
import os

if not os.path.exists("/dev/nvidia0"):
    _set_start_method = multiprocessing.set_start_method

    def set_start_method(method: str, force: bool = False) -> None:
        _set_start_method("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = set_start_method
