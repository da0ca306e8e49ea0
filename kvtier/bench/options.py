"""The command line: text in, one validated `Options` out, before anything heavy is imported.

Every error is a UsageError that names the flag and what was expected.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kvtier.bench.policies import FP8, POLICIES, Policy, parse_policies
from kvtier.bench.recorded import add_replay_flags, parse_replay
from kvtier.bench.schema import Replay, Workload
from kvtier.config import SETTINGS, Settings, load_settings
from kvtier.errors import BudgetError, SizeError, UsageError
from kvtier.sizes import parse_count, parse_size

PROGRAM = "kvtier.bench"
DEFAULT_BUDGET_SESSIONS = 3.0
DEFAULT_BUDGET_REQUESTS = 32.0
DEFAULT_TURNS, DEFAULT_LEN = "5", "32k"
MIN_CONTEXT_TOKENS = 64
MIN_CHUNK_TOKENS = 16
DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "bfloat16", FP8)
FORMATS = ("table", "json")
SCRIPTS = ("auto", "recall", "text")
# The settings of a server that are flags of the bench, too.
SETTING_FLAGS = (
    *("head_profile", "quality", "curve", "retention", "scorer", "scorer_file", "head_budgets"),
    *("kept_dtype", "refresh", "merge"),
)

_EPILOG = """\
Ratios are printed so that bigger is better for kvtier: bytes, times and NLL are baseline / kvtier,
recall and resident sessions are kvtier / baseline.
exit codes: 0 all policies ran, 1 a policy failed, 2 usage error, 130 interrupted
"""


@dataclass(frozen=True)
class Budget:
    """The KV memory every policy gets: bytes, or so many full sessions. `argument` is its flag."""

    argument: str
    num_bytes: int | None = None
    full_sessions: float | None = None


@dataclass(frozen=True)
class Options:
    """The options that the user gave. budget None: room for exactly one session, whatever that
    takes.

    workload: what of it is known without the model; `make_plans` adds its words and their lengths
              (of a trace its words)
    script:   one of SCRIPTS
    """

    policies: tuple[Policy, ...]
    workload: Workload | Replay
    script: str
    settings: Settings
    chunk_tokens: int
    budget: Budget | None
    model_path: Path | None
    device: str | None
    dtype: str | None
    kv_dtype: str
    json_path: Path | None
    report_path: Path | None
    json_output: bool
    quiet: bool
    dry_run: bool


# An address that asks for a service of the run's own.
LOCAL_TIER = "localhost:0"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: raised, not printed."""

    def error(self, message: str) -> NoReturn:
        named = re.fullmatch(r"argument (\S+): (.*)", message)
        if named is not None:
            raise UsageError(named[1], "a valid value (see --help)", named[2])
        raise UsageError("arguments", "only flags that --help lists", message)


def make_parser() -> argparse.ArgumentParser:
    """Flags are kept as text; `parse_options` gives them meaning."""
    parser = _Parser(
        prog=f"python -m {PROGRAM}",
        description="Hold long multi-turn sessions with SGLang, with and without kvtier.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("workload").add_argument
    add("--turns", help=f"turns per session ({DEFAULT_TURNS})")
    add("--len", help=f"context tokens: 4096, 32k, … ({DEFAULT_LEN})")
    add("--sessions", help="sessions, interleaved by turn (1)")
    add("--questions", help="questions per turn, for recall (8; 1 under a KV budget)")
    add("--seed", default="0", help="seed of the workload (%(default)s)")
    add("--workload", default="auto", help="recall: the demo model's language; text: English in "
        "the model's own tokens; auto: what its tokenizer speaks (%(default)s)")  # fmt: skip
    add_replay_flags(parser.add_argument_group("recorded traffic, instead of such sessions"))
    beside = "A head profile, a curve and a token_worth.npz beside the model need no flag."
    add = parser.add_argument_group("serving", beside).add_argument
    add("--policies", default="full,kvtier", help=f"from {', '.join(POLICIES)} (%(default)s)")
    add("--model-path", help="model directory (the demo model)")
    for setting in SETTINGS:
        if setting.names[0] in SETTING_FLAGS:
            add(setting.flags[0], metavar="VALUE", help=setting.field.description)
    add("--tier", metavar="ADDRESS", help="KV tier, or `local` to start one for the run")
    add("--chunk", help="prefill chunk tokens (a quarter of --len, 512 to 4096)")
    add("--budget-sessions", help="KV budget in full sessions (3 with --sessions), or in full "
        "requests of a trace's mean length (32)")  # fmt: skip
    add("--kv-budget", help="KV budget in bytes: 512m, 8g, …")
    add("--device", help=f"{' or '.join(DEVICES)} (cuda where there is one)")
    add("--dtype", help=f"{', '.join(DTYPES)} (float32 on CPU, else the model's 16 bits)")
    add("--kv-dtype", default="auto", help=f"{', '.join(KV_DTYPES)}: of the KV cache, but for -fp8 "
        "policies (--dtype)")  # fmt: skip
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help="write the whole outcome as JSON")
    add("--report", metavar="FILE", help="write one self-contained HTML page")
    add("--format", default="table", help=f"of stdout: {' or '.join(FORMATS)} (%(default)s)")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")
    add("--dry-run", action="store_true", help="print plan and memory arithmetic only")
    return parser


def parse_options(argv: Sequence[str]) -> Options:
    """Options from flags, KVTIER_* environment and file. Raises UsageError."""
    args = make_parser().parse_args(argv)
    policies = parse_policies(args.policies)
    workload, budget = _workload(args)
    return Options(
        policies=policies,
        workload=workload,
        script=_choice(args.workload, "--workload", SCRIPTS) or "auto",
        settings=load_settings(
            tier=_tier(args.tier, policies), **{name: getattr(args, name) for name in SETTING_FLAGS}
        ),
        chunk_tokens=_chunk(args.chunk, longest_input(workload)),
        budget=budget,
        model_path=None if args.model_path is None else Path(args.model_path),
        device=_choice(args.device, "--device", DEVICES),
        dtype=_choice(args.dtype, "--dtype", DTYPES),
        kv_dtype=_choice(args.kv_dtype, "--kv-dtype", KV_DTYPES) or "auto",
        json_path=output_file(args.json, "--json"),
        report_path=output_file(args.report, "--report"),
        json_output=_choice(args.format, "--format", FORMATS) == "json",
        quiet=args.quiet,
        dry_run=args.dry_run,
    )


def _workload(args: argparse.Namespace) -> tuple[Workload | Replay, Budget | None]:
    """The traffic of a trace where one is named, else sessions; and the KV budget that goes with
    it."""
    seed = parse_count(args.seed, "--seed", least=0)
    replay = parse_replay(args, seed)
    if replay is not None:
        for flag in ("turns", "len", "sessions", "questions"):
            if getattr(args, flag) is not None:
                raise UsageError(f"--{flag}", "no such flag beside --trace", getattr(args, flag))
        default = Budget("--budget-sessions", full_sessions=DEFAULT_BUDGET_REQUESTS)
        return replay, _budget(args.budget_sessions, args.kv_budget, 1) or default
    context = args.len or DEFAULT_LEN
    context_tokens = parse_size(context, "--len")
    if context_tokens < MIN_CONTEXT_TOKENS:
        raise SizeError("--len", f"at least {MIN_CONTEXT_TOKENS} tokens", context)
    sessions = parse_count(args.sessions or "1", "--sessions")
    budget = _budget(args.budget_sessions, args.kv_budget, sessions)
    workload = Workload(
        context_tokens=context_tokens,
        turns=parse_count(args.turns or DEFAULT_TURNS, "--turns"),
        sessions=sessions,
        questions=parse_count(args.questions or ("8" if budget is None else "1"), "--questions"),
        seed=seed,
    )
    return workload, budget


def longest_input(workload: Workload | Replay) -> int:
    """Tokens of the longest prompt to be prefilled at once, about."""
    return workload.longest_tokens if isinstance(workload, Replay) else workload.context_tokens


def _choice(text: str | None, argument: str, valid: Sequence[str]) -> str | None:
    if text is not None and text not in valid:
        raise UsageError(argument, f"one of {', '.join(valid)}", text)
    return text


def _tier(text: str | None, policies: Sequence[Policy]) -> str | None:
    """A policy that is named for its tier gets one of its own where none is named."""
    return text or (LOCAL_TIER if any(policy.has_tier for policy in policies) else None)


def _chunk(text: str | None, context_tokens: int) -> int:
    if text is None:
        return max(512, min(4096, context_tokens // 4))
    value = parse_size(text, "--chunk")
    if value < MIN_CHUNK_TOKENS:
        raise SizeError("--chunk", f"at least {MIN_CHUNK_TOKENS} tokens", text)
    return value


def _budget(full_sessions: str | None, num_bytes: str | None, sessions: int) -> Budget | None:
    if full_sessions is not None and num_bytes is not None:
        raise UsageError("--kv-budget", "only one of --kv-budget and --budget-sessions", num_bytes)
    if num_bytes is not None:
        return Budget("--kv-budget", num_bytes=parse_size(num_bytes, "--kv-budget"))
    if full_sessions is None:
        return Budget("--sessions", full_sessions=DEFAULT_BUDGET_SESSIONS) if sessions > 1 else None
    try:
        value = float(full_sessions)
    except ValueError:
        value = math.nan
    if not 1 <= value < math.inf:
        raise BudgetError("--budget-sessions", "a number of at least 1", full_sessions)
    return Budget("--budget-sessions", full_sessions=value)


def output_file(text: str | None, argument: str) -> Path | None:
    """A file that can be written once the run is over, checked before it begins."""
    if text is None:
        return None
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(argument, "a file in an existing directory", text)
    return path
