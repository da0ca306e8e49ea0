"""The command of every benchmark: it reads its arguments, measures, judges, and writes JSON.

    BENCHMARK = Benchmark("cost.example", __doc__, declare, run, out=RESULTS / "example.json")
    main = BENCHMARK.main

    def declare(arguments: Arguments) -> None: ...      its own flags; --out and --seed are there
    def run(options: Options) -> Measured: ...           measure, print tables, return the figures

    {schema_version, started_at, wall_s, environment, …figures, bars}      what --out gets

Only the standard library, kvtier's errors and its environment are imported, so that a benchmark of
the kernels runs where there is torch and little else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import Arguments as Arguments
from benchmarks.common.arguments import Options as Options
from benchmarks.common.bars import Bar as Bar
from kvtier.environment import describe_environment
from kvtier.errors import KvtierError, UsageError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Measured:
    """The findings of a benchmark. figures: as they stand in the JSON; bars: None where nothing is
    claimed."""

    figures: Mapping[str, Any]
    bars: Sequence[Bar] | None = None


@dataclass(frozen=True)
class Benchmark:
    """One command.

    name:        of its module, below `benchmarks`
    description: of which the first line is what --help says
    declare:     adds its own flags
    run:         measures and prints tables; where it yields several, each is written when it
                 comes, so that a run that is cut off leaves something, and the last one is judged
    out:         where the JSON goes if --out does not say; None: nowhere
    seed:        the default of --seed, of everything that is drawn
    gpu:         refused where there is no CUDA device, which is described in the environment; but
                 for `--dry`, where a benchmark has such a flag
    """

    name: str
    description: str
    declare: Callable[[Arguments], None]
    run: Callable[[Options], Measured | Iterator[Measured]]
    out: Path | None = None
    schema_version: int = 1
    seed: int = 0
    gpu: bool = False

    def parse(self, argv: Sequence[str] | None = None) -> Options:
        """The options, checked. Raises UsageError, and SystemExit as argparse does."""
        arguments = Arguments(self.name, self.description)
        where = "" if self.out is None else " (%(default)s)"
        arguments.add(
            "--out", type=Path, default=self.out, metavar="FILE", help=f"JSON of the outcome{where}"
        )
        arguments.whole("--seed", self.seed, "of everything that is drawn", least=0)
        self.declare(arguments)
        return arguments.parse(argv)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """The command. 0 when all bars are met, 1 when one is not or something failed, 2 for bad
        input or where it cannot be measured here."""
        try:
            options = self.parse(argv)
            if self._wants_gpu(options):
                require_gpu()
            bars = self._measure(options)
        except UsageError as error:
            print(f"benchmarks.{self.name}: error: {error}", file=sys.stderr)
            return 2
        except (KvtierError, subprocess.CalledProcessError) as error:
            print(f"benchmarks.{self.name}: {error}", file=sys.stderr)
            return 1
        for bar in bars:
            print(bar)
        return 0 if all(bar.met for bar in bars) else 1

    def _wants_gpu(self, options: Options) -> bool:
        return self.gpu and not getattr(options, "dry", False)

    def _measure(self, options: Options) -> Sequence[Bar]:
        """Run, write every outcome, and return what the last one claims."""
        started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
        environment = asdict(describe_environment(options.seed))
        environment |= _device() if self._wants_gpu(options) else {}
        bars: Sequence[Bar] = ()
        found = self.run(options)
        for measured in (found,) if isinstance(found, Measured) else found:
            document = {
                "schema_version": self.schema_version,
                "started_at": started,
                "wall_s": round(time.perf_counter() - began, 1),
                "environment": environment,
                **measured.figures,
            }
            bars = measured.bars or ()
            if measured.bars is not None:
                document["bars"] = [bar.document() for bar in bars]
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(document, indent=1) + "\n")
        return bars


def require_gpu() -> None:
    """Raises UsageError where there is no CUDA device, or no C compiler for Triton."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError("device", "a CUDA device", "none")
    if (os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")) is None:
        raise UsageError("CC", "a C compiler, for Triton (CC, cc or gcc)", "none")


def _device() -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_properties(0)
    return {
        "device": device.name,
        "memory_bytes": device.total_memory,
        "multiprocessors": device.multi_processor_count,
        "cuda": torch.version.cuda,
    }
