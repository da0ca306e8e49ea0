"""Drafts on a CPU are refused with SGLang before 0.5.23 (kvtier_sglang.cpu_drafts)."""

from kvtier_sglang.cpu_drafts import FIRST_VERSION
from kvtier_sglang.versions import sglang_version

collect_ignore_glob = ["test_*.py"] if sglang_version() < FIRST_VERSION else []
