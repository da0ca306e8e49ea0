"""What the kernels do on this GPU, in one command: are they right, and how near to its memory?

    make gpu-check
    PYTHONPATH=.:kernels python -m benchmarks.gpu.check     with torch and triton alone

Meant for less than ten minutes, without a network. Attention of Llama-3.1-8B's shape (32 query
heads, 8 KV heads, dim 128, bfloat16), one layer's KV at a time:

    tests     the equivalence suite on this device, where pytest and hypothesis are installed
    equal     Triton against the reference, and graphs against eager calls
    decode    batches of 1 to 64 contexts of 8k to 128k, 25% and 50% CA heads: the share of this
              GPU's own read bandwidth, and the time against full KV
    planning  what a decoding step costs the host
    choosing  Compactor's selection and KeepKV's merge for all 32 layers of 128k, against that
              context's prefill attention
    engine    `kvtier.bench` at 128k with the demo model, where SGLang and kvtier are installed

With --flashinfer (`make gpu-check FLASHINFER=1`) also the backend of that name, tests and decodes;
it wants nvcc, and compiles for minutes the first time: `--parts decode flashinfer` and `--parts
tests` after each other split a long run. With --peers DIR (`PEERS=DIR`) the same decodes by others'
kernels, which `benchmarks/gpu/peer_kernels.py` says how to bring there.

Full KV is FlashInfer's decode with --flashinfer, else our own over all heads, and the JSON says
which. Times are medians; a decode is replayed as a CUDA graph over enough layers' KV that no cache
holds it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.command import ROOT
from benchmarks.cost.choosing_context import LAYERS, MOST_CHOOSING
from benchmarks.gpu.check_choosing import measure_choosing
from benchmarks.gpu.check_measures import (
    SHAPES,
    check_equal,
    measure_decode,
    measure_flashinfer,
    measure_planning,
    read_bandwidth,
)
from benchmarks.gpu.check_peers import measure_peers

SCHEMA_VERSION = 1
PACKAGES = ("torch", "triton", "flashinfer-python", "sglang")
# Of what a kernel reads that does nothing else, over retained bytes.
LEAST_BANDWIDTH = 0.85
# Time per retained byte, against full KV's per byte.
MOST_TIME = 1.1
# Time with votes, against without.
MOST_VOTES = 1.05
# Host time of a decoding step, both classes.
MOST_PLANNING_US = 200.0
# Of bfloat16 outputs, absolute.
MOST_DIFFERENCE = 2e-3
TESTS_LIMIT_S = 240
TESTS_PROCESSES = 8
ENGINE_ARGUMENTS = (
    "--turns",
    "5",
    "--len",
    "128k",
    "--policies",
    "full,kvtier",
    "--device",
    "cuda",
)
ENGINE_LIMIT_S = 300


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 when every bar is met, 1 when one is not, 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu.check", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON of the outcome")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flashinfer", action="store_true", help="the backend flashinfer, too")
    parser.add_argument("--peers", type=Path, default=None, metavar="DIR", help="others' kernels")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="(all)")
    options = parser.parse_args(argv)
    asked = Asked(options.seed, options.flashinfer, options.peers)
    for name in options.parts or ():
        if asked.leaves_out(name):
            parser.error(f"--parts {name} wants --{name}")
    if not torch.cuda.is_available():
        print("benchmarks.gpu.check: error: a CUDA device is wanted, and there is none",
              file=sys.stderr)  # fmt: skip
        return 2
    if (os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")) is None:
        print("benchmarks.gpu.check: error: a C compiler is wanted, for Triton (CC, cc or gcc)",
              file=sys.stderr)  # fmt: skip
        return 2

    def written(document: dict[str, Any]) -> None:
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(document, indent=1) + "\n")

    document = run(asked, written, options.parts or PARTS)
    print_table(document)
    return 0 if all(bar["met"] for bar in document["bars"]) else 1


@dataclass(frozen=True)
class Asked:
    """What the command was asked for. flashinfer, peers: what is measured only then."""

    seed: int
    flashinfer: bool
    peers: Path | None

    def leaves_out(self, part: str) -> bool:
        return (part == "flashinfer" and not self.flashinfer) or (
            part == "peers" and self.peers is None
        )


def run(
    asked: Asked, written: Callable[[dict[str, Any]], None], names: Collection[str]
) -> dict[str, Any]:
    """Parts by their names; one that fails is named in `failures`, and the others go on.

    written: is given the document after every part, as what is cut off should leave something.
    """
    torch.manual_seed(asked.seed)
    began = time.perf_counter()
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "environment": environment(),
        "failures": {},
    }
    for name, part in PARTS.items():
        if name not in names or asked.leaves_out(name):
            continue
        print(f"{time.perf_counter() - began:6.1f} s  {name}", file=sys.stderr, flush=True)
        try:
            document[name] = part(asked)
            # What a kernel did wrong is said here, not of the next part.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:
            # One part must not cost the others: a GPU may be there for minutes only. After some
            # faults no other kernel runs in this process, but engine and tests have their own.
            traceback.print_exc()
            document["failures"][name] = f"{type(error).__name__}: {error}"
            with suppress(Exception):
                # Or the engine would find little memory.
                torch.cuda.empty_cache()
        document["bars"] = bars(document)
        document["wall_s"] = round(time.perf_counter() - began, 1)
        written(document)
    return document


def environment() -> dict[str, Any]:
    device = torch.cuda.get_device_properties(0)
    found = {"python": platform.python_version()}
    found |= {name: known for name in PACKAGES if (known := _version(name)) is not None}
    commit = ""
    if shutil.which("git") is not None:
        git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": device.name,
        "memory_bytes": device.total_memory,
        "multiprocessors": device.multi_processor_count,
        "cuda": torch.version.cuda,
        "versions": found,
        "commit": commit or None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def run_tests(*, flashinfer: bool) -> dict[str, Any]:
    """The equivalence suite on the device, where what it is written with is installed."""
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        return {"ran": False, "missing": missing}
    suites = ["tests/kernels"]
    if find_spec("sglang") is not None:
        suites += ["tests/engine/test_streams.py", "tests/engine/test_absent_gpu.py"]
    # Others' warnings are no errors of ours, in whatever versions there are here.
    command = [sys.executable, "-m", "pytest", "-q", *suites, "-m", "not slow", "-W", "default"]
    if find_spec("xdist") is not None:
        # Most of the time is compiling.
        command += ["-n", str(TESTS_PROCESSES)]
    if not flashinfer:
        command += ["-k", "not flashinfer"]
    # FlashInfer compiles for minutes the first time.
    code, said = run_limited(command, None if flashinfer else TESTS_LIMIT_S)
    return {"ran": True, "passed": code == 0, "said": said.splitlines()[-60:]}


def run_engine() -> dict[str, Any]:
    """The bench's table, where there is an engine for it; its plugin is found by its metadata."""
    missing = [name for name in ("sglang", "kvtier") if _version(name) is None]
    if missing:
        return {"ran": False, "missing": missing}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "kvtier.bench", "--quiet", "--json", str(out)]
        _, said = run_limited([*command, *ENGINE_ARGUMENTS], ENGINE_LIMIT_S)
        if not out.exists():
            raise RuntimeError(f"kvtier.bench: {said[-2000:]}")
        bench = json.loads(out.read_text())
    return {
        "ran": True,
        "arguments": list(ENGINE_ARGUMENTS),
        "policies": {run["policy"]: run["summary"] for run in bench["runs"]},
        "ratios": bench["ratios"],
        "failures": bench["failures"],
    }


def run_limited(command: Sequence[str], limit_s: float | None) -> tuple[int | None, str]:
    """A command's exit status, and what it says. Past the limit it is ended with all that it
    started, which would hold the device's memory: no status, and the last line says so."""
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, cwd=ROOT, stdout=said, stderr=said, start_new_session=True
        ) as process,
    ):
        code, late = None, ""
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            late = f"\nstopped after {limit_s} s"
        said.seek(0)
        return code, said.read().strip() + late


PARTS: Mapping[str, Callable[[Asked], Any]] = {
    "equal": lambda asked: check_equal(SHAPES, asked.seed),
    "read_bytes_per_s": lambda _: read_bandwidth(),
    "decode": lambda asked: [
        measure_decode(shape, asked.seed, flashinfer=asked.flashinfer) for shape in SHAPES
    ],
    "planning": lambda _: measure_planning(),
    "choosing": lambda asked: measure_choosing(asked.seed),
    "peers": lambda asked: measure_peers(SHAPES, asked.seed, asked.peers),
    "flashinfer": lambda asked: measure_flashinfer(SHAPES, asked.seed),
    "engine": lambda _: run_engine(),
    "tests": lambda asked: run_tests(flashinfer=asked.flashinfer),
}


def bars(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What is claimed of what was measured."""
    found = []

    def bar(what: str, value: float, met: bool) -> None:
        found.append({"bar": what, "value": round(value, 4), "met": met})

    if "tests" in document:
        passed = document["tests"].get("passed", False)
        bar("the equivalence suite passes", float(passed), passed)
    if not document.get("flashinfer", {}).get("ran", True):
        bar("the backend flashinfer runs", 0.0, False)
    for name, difference in document.get("equal", {}).items():
        bar(f"{name}: largest difference", difference, difference <= MOST_DIFFERENCE)
    ceiling = document.get("read_bytes_per_s")
    for row in document.get("decode", []):
        name = row["shape"]
        if "flashinfer_missing" in row:
            why = row["flashinfer_missing"]
            found.append(
                {"bar": f"{name}: full KV by FlashInfer: {why}", "value": None, "met": False}
            )
        if ceiling:
            share = row["retained_bytes"] / row["retained_s"] / ceiling
            bar(f"{name}: bandwidth / ceiling", share, share >= LEAST_BANDWIDTH)
        time_ratio = row["retained_s"] / row["full_s"]
        ratio = time_ratio / (row["retained_bytes"] / row["full_bytes"])
        bar(f"{name}: time / full KV's, per byte", ratio, ratio <= MOST_TIME)
        votes = row["voted_s"] / row["retained_s"]
        bar(f"{name}: with votes / without", votes, votes <= MOST_VOTES)
    if "planning" in document:
        planning = document["planning"]["host_us"]
        bar("host planning of a step, us", planning, planning <= MOST_PLANNING_US)
    if "choosing" in document:
        choosing = document["choosing"]
        for what in (("selection",), ("merge",), ("selection", "merge")):
            share = sum(choosing[f"{one}_s"] for one in what) / choosing["prefill_s"]
            bar(f"{' + '.join(what)} / prefill attention", share, share <= MOST_CHOOSING)
        waits = choosing["selection_waits"] + choosing["merge_waits"]
        bar("choosing: times that the host waits", waits, waits == 0)
    peers = document.get("peers", {})
    for row in peers.get("compactor_vllm", []):
        name = f"{row['shape']}: compactor-vllm's kernel"
        difference, share = row["difference"], row["ours_s"] / row["theirs_s"]
        bar(f"{name}, largest difference", difference, difference <= MOST_DIFFERENCE)
        bar(f"{name}, our time / its", share, share <= 1)
    for row in peers.get("kvpress", []):
        name = f"{row['shape']}: kvpress's masked attention, largest difference"
        bar(name, row["difference"], row["difference"] <= MOST_DIFFERENCE)
    for name, why in peers.get("missing", {}).items():
        found.append({"bar": f"{name} did not run: {why}", "value": None, "met": False})
    for row in document.get("flashinfer", {}).get("decode", []):
        for what in ("retained", "voted"):
            difference = row[what + "_difference"]
            name = f"{row['shape']}, {what}: FlashInfer to Triton, largest difference"
            bar(name, difference, difference <= MOST_DIFFERENCE)
    engine = document.get("engine", {})
    if engine.get("ran"):
        bar("the engine's bench runs", float(not engine["failures"]), not engine["failures"])
    for name, failure in document["failures"].items():
        found.append({"bar": f"{name}: {failure}", "value": None, "met": False})
    return found


def print_table(document: dict[str, Any]) -> None:
    """Everything that is claimed, a line each."""
    where = document["environment"]
    print(f"{where['device']}, CUDA {where['cuda']}, {where['versions']}, {document['wall_s']} s")
    ceiling = document.get("read_bytes_per_s")
    if ceiling:
        print(f"read bandwidth {ceiling / 1e12:.2f} TB/s")
    for name in ("tests", "engine", "flashinfer"):
        part = document.get(name, {"ran": True})
        if not part["ran"]:
            print(f"{name} did not run, without {part['missing']}")
    if not document.get("tests", {}).get("passed", True):
        print("\n".join(document["tests"]["said"]))
    for row in document.get("decode", []):
        print(
            f"{row['shape']:42} retained {row['retained_s'] * 1e6:8.1f} us, votes "
            f"{row['voted_s'] * 1e6:8.1f} us, full {row['full_s'] * 1e6:8.1f} us "
            f"({row['full_kernel']})"
        )
    for row in document.get("flashinfer", {}).get("decode", []):
        print(
            f"{row['shape']:42} retained {row['retained_s'] * 1e6:8.1f} us, votes "
            f"{row['voted_s'] * 1e6:8.1f} us, planning {row['planning_us']:8.1f} us (flashinfer)"
        )
    for peer in ("compactor_vllm", "kvpress"):
        for row in document.get("peers", {}).get(peer, []):
            ours, theirs = row["ours_s"] * 1e6, row["theirs_s"] * 1e6
            print(f"{row['shape']:42} ours {ours:8.1f} us, {peer} {theirs:8.1f} us, "
                  f"{theirs / ours:.2f}x")  # fmt: skip
    for policy, row in document.get("engine", {}).get("policies", {}).items():
        print(
            f"bench at 128k, {policy:20} {row['kv_device_bytes'] / 2**20:8.1f} MiB, TTFT "
            f"{row['median_ttft_ms']:.1f} ms, TPOT {row['median_tpot_ms']:.2f} ms, "
            f"recall {row['recall']}"
        )
    choosing = document.get("choosing", {})
    for name, taken in choosing.get("prefills_s", {}).items():
        print(f"prefill attention of 128k, {LAYERS} layers: {taken:.2f} s by {name}")
    for name, taken in choosing.get("parts_s", {}).items():
        print(f"choosing, one layer: {taken * 1e3:8.2f} ms {name}")
    for bar in document["bars"]:
        print(f"{'met' if bar['met'] else 'NOT':4} {bar['bar']:70} {bar['value']}")


__all__ = ["main", "run"]

if __name__ == "__main__":
    sys.exit(main())
