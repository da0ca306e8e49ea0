"""Importing the engine warns about hardware it does not find; that is not what we test."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.managers.schedule_batch
    import sglang.srt.model_executor.forward_batch_info  # noqa: F401
