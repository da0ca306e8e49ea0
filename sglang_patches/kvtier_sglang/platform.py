"""An out-of-tree platform that lets stock SGLang run on any CPU.

SGLang's own CPU path wants an AMX build of its kernels. This platform only says "a CPU, no
special kernels", which is enough for the engine, and steps aside wherever an accelerator is
available, so that installing kvtier never changes a GPU server's platform.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform

from kvtier.config import ENV_PREFIX
from kvtier_sglang.cpu_drafts import slots_of_drafts


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the platform class, or None where CUDA is at hand.

    Read from the environment, not from Settings: SGLang asks before any configuration exists,
    and a broken configuration file must not change which device is served.
    """
    return f"{__name__}:KvtierCpuPlatform" if is_cpu() else None


def is_cpu() -> bool:
    """Return whether this process serves on a CPU, by the platform below."""
    forced = os.environ.get(ENV_PREFIX + "FORCE_CPU", "").lower() in ("1", "true", "yes")
    return forced or not torch.cuda.is_available()


class KvtierCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Any CPU: no Triton, no graphs, torch-native operators."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        return slots_of_drafts

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return self.get_default_attention_backend()

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_torch_profiler_activity_str(self) -> str:
        return self.get_torch_profiler_activity().name

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False
