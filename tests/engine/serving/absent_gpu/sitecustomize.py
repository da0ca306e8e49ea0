"""Makes a process believe in a GPU that is not there; Python imports this first where it finds it.

Tensors that are put on "cuda" are put on the CPU, streams and events do nothing, collectives are
gloo's. So SGLang takes its CUDA branches, and attention and plans are Triton's, interpreted: what
they call, in which order, with which arguments. A CUDA graph is what was captured, called again.
Code that asks a tensor for its device takes a CPU's branch, and what a device does is not shown.
"""

import importlib.abc
import importlib.util
import os
import sys
import types

NAME = "a GPU that is not there"
REPLAYS = "ABSENT_GPU_REPLAYS"
TOTAL, FREE = 150 * 10**9, 149 * 10**9


class Properties:
    """The properties of a Hopper with few multiprocessors, as each costs the interpreter."""

    name = NAME
    major, minor, warp_size = 9, 0, 32
    multi_processor_count = 4
    total_memory = TOTAL
    L2_cache_size = 60 << 20
    shared_memory_per_block_optin = 232448
    is_integrated = False
    uuid = "absent"


class Stream:
    """A stream or an event: all work is done when it is asked for."""

    made = 0

    def __init__(self, *args, **kwargs):
        Stream.made += 1
        self.cuda_stream = Stream.made

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def believe(torch):
    """Patch torch, which was just imported."""
    from torch.overrides import TorchFunctionMode

    current = Stream()
    nothing = {"reserved_bytes.all.current": 0, "reserved_bytes.all.peak": 0}
    answers = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_capability": (9, 0), "get_device_properties": Properties,
        "get_device_name": NAME, "mem_get_info": (FREE, TOTAL), "current_stream": current,
        "default_stream": current, "memory_stats": nothing, "max_memory_allocated": 0,
        "memory_allocated": 0, "memory_reserved": 0, "is_current_stream_capturing": False,
        "set_device": None, "synchronize": None, "empty_cache": None, "ipc_collect": None,
        "reset_peak_memory_stats": None, "manual_seed": None, "manual_seed_all": None,
        "_lazy_init": None, "current_blas_handle": 0,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    for name in ("Stream", "Event", "StreamContext", "stream", "device"):
        setattr(torch.cuda, name, Stream)
    torch.cuda.nvtx = types.SimpleNamespace(
        range_push=lambda *_: None, range_pop=lambda *_: None, mark=lambda *_: None
    )
    torch.get_device_module = lambda device=None: torch.cuda

    def here(x):
        """x, or the CPU where it is a device that is not there."""
        if isinstance(x, torch.device) and x.type == "cuda":
            return torch.device("cpu")
        return "cpu" if isinstance(x, str) and x.partition(":")[0] == "cuda" else x

    class OnTheCpu(TorchFunctionMode):
        def __torch_function__(self, func, types_, args=(), kwargs=None):
            if func is torch.device:
                # A function that asks for its type is told the truth that is believed.
                return func(*args, **kwargs or {})
            kwargs = {name: here(x) for name, x in (kwargs or {}).items()}
            if "pin_memory" in kwargs:
                kwargs["pin_memory"] = False
            return func(*map(here, args), **kwargs)

    OnTheCpu().__enter__()
    for name in ("pin_memory", "cuda"):
        setattr(torch.Tensor, name, lambda self, *args, **kwargs: self)
    torch.Tensor.record_stream = lambda self, stream: None
    by_gloo(torch.distributed)


def by_gloo(distributed):
    begin, group = distributed.init_process_group, distributed.new_group

    def begin_by_gloo(*args, **kwargs):
        kwargs.pop("device_id", None)
        return begin(**{**kwargs, "backend": "gloo"})

    def group_by_gloo(*args, **kwargs):
        kwargs.pop("pg_options", None)
        if kwargs.get("backend"):
            kwargs["backend"] = "gloo"
        return group(*args, **kwargs)

    distributed.init_process_group, distributed.new_group = begin_by_gloo, group_by_gloo


def call_again(graphs):
    """Patch SGLang's module of whole graphs. A replay leaves a mark in the file REPLAYS names."""

    class CalledAgain(graphs.FullCudaGraphBackend):
        def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None):
            forward_fn()
            self._graphs[shape_key] = forward_fn

        def replay(self, shape_key, static_forward_batch, **kwargs):
            if path := os.environ.get(REPLAYS):
                with open(path, "a") as marks:
                    marks.write(f"{shape_key.size}\n")
            return self._graphs[shape_key]()

        def cleanup(self):
            self._graphs.clear()

    graphs.FullCudaGraphBackend = CalledAgain


class After(importlib.abc.MetaPathFinder):
    """Finds a module as the other finders do, and has it patched once it is there."""

    def __init__(self, wanted, patch):
        self.wanted, self.patch = wanted, patch

    def find_spec(self, name, path=None, target=None):
        if name != self.wanted:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            self.patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


sys.meta_path[:0] = [
    After("torch", believe),
    After("sglang.srt.model_executor.runner_backend.full_cuda_graph_backend", call_again),
]
import fork_instead_of_spawn  # noqa: E402, F401

if "COVERAGE_PROCESS_START" in os.environ:
    import periodic_coverage  # noqa: F401

# It asks the driver as soon as it is imported.
sys.modules["deep_gemm"] = None
