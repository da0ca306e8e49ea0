"""Saves what a process has covered every few seconds, as SGLang ends its processes by SIGKILL."""

import contextlib
import os
import threading

from coverage import Coverage

INTERVAL_S = 3.0


def _save_again_and_again() -> None:
    # Never set: the wait is the interval.
    ended = threading.Event()
    while not ended.wait(INTERVAL_S):
        if (coverage := Coverage.current()) is not None:
            # The coverage that cannot be saved now is saved the next time.
            with contextlib.suppress(Exception):
                coverage.save()


def _start() -> None:
    threading.Thread(target=_save_again_and_again, name="coverage", daemon=True).start()


_start()
os.register_at_fork(after_in_child=_start)
