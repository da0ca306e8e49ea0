"""`kvtier calibrate heads` and `kvtier calibrate tokens`: the command-line face of
`kvtier.heads.calibrate` and of `kvtier.heads.tokens`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import UsageError
from kvtier.heads.methods import DEFAULT_METHOD, METHODS, Target
from kvtier.heads.model.config import located
from kvtier.heads.progress import shown_progress
from kvtier.heads.report import draw_profile, summary
from kvtier.sizes import parse_size

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_LENGTHS, DEFAULT_SAMPLES = "4k", 4
MODEL_HELP = "a directory, or a hub id, which is downloaded where it is not in the hub's cache"


def add_heads_parser(kinds: Subparsers) -> None:
    """Add the kind `heads` of `kvtier calibrate`; parsed arguments carry `handler`."""
    heads = kinds.add_parser(
        "heads",
        help="find the KV heads that need the whole context, and measure what keeping them costs",
    )
    heads.add_argument("--model-path", required=True, help=MODEL_HELP)
    heads.add_argument(
        "--method", default=DEFAULT_METHOD, choices=sorted(METHODS),
        help="how they are found (default: %(default)s)",
    )  # fmt: skip
    heads.add_argument("--share", type=float, help="share of KV heads to keep, such as 0.25")
    heads.add_argument(
        "--budget",
        type=float,
        help="largest share that may be lost of what the context is worth to the answers, such as "
        "0.02",
    )
    heads.add_argument("--out", type=Path, required=True, help="profile to write (JSON)")
    heads.add_argument("--picture", type=Path, help="picture of it to write (PNG)")
    _add_sample_options(heads.add_argument_group("samples"))
    _add_method_options(heads.add_argument_group("single methods"))
    heads.add_argument("-q", "--quiet", action="store_true", help="no progress and no summary")
    heads.set_defaults(handler=run_calibrate_heads)


def add_tokens_parser(kinds: Subparsers) -> None:
    """Add the kind `tokens` of `kvtier calibrate`; parsed arguments carry `handler`."""
    parser = kinds.add_parser(
        "tokens", help="fit what each token will be worth to later turns (--scorer reconstruction)"
    )
    add = parser.add_argument
    add("--model-path", required=True, help=MODEL_HELP)
    add("--out", type=Path, required=True, help="file to write, such as token_worth.npz")
    add("--len", help="context lengths (default: 1536,4000, or shorter where the model reads less)")
    add("--contexts", type=int, help="contexts per length (default: 8 short ones, 4 long ones)")
    add("--seed", type=int, default=0)
    add("-q", "--quiet", action="store_true", help="no progress and no summary")
    parser.set_defaults(handler=run_calibrate_tokens)


def run_calibrate_tokens(options: argparse.Namespace) -> int:
    """Handler of `kvtier calibrate tokens`. Raises KvtierError; returns the exit code 0."""
    lengths = options.len and [parse_size(text, "--len") for text in options.len.split(",")]
    if options.seed < 0:
        raise UsageError("--seed", "at least 0", options.seed)
    if options.out.is_dir() or not options.out.parent.is_dir():
        raise UsageError("--out", "a file in an existing directory", str(options.out))
    if options.out.suffix == ".safetensors":
        # In a model's folder it would be taken for weights of the model.
        raise UsageError("--out", "another name, such as token_worth.npz", str(options.out))

    from kvtier.heads import tokens

    with shown_progress(options.quiet) as progress:
        fit = tokens.fit_tokens(
            located(options.model_path), contexts=options.contexts, lengths=lengths,
            seed=options.seed, progress=progress,
        )  # fmt: skip
    fit.worth.save(options.out)
    if not options.quiet:
        print("\n".join(tokens.summary(fit, options.out)))
    return 0


def _add_sample_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--len", help=f"context lengths, such as 4k,32k (default: {DEFAULT_LENGTHS})"
    )
    group.add_argument(
        "--samples", type=int, help=f"contexts per length (default: {DEFAULT_SAMPLES})"
    )
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--samples-file", type=Path, metavar="FILE.jsonl",
        help='your own samples instead, one per line: {"context": …, "questions": [{"question": …, '
        '"answer": …}], "task": …}; of each task every second one only measures',
    )  # fmt: skip


def _add_method_options(group: argparse._ArgumentGroup) -> None:
    for name, method in METHODS.items():
        for option in method.options:
            group.add_argument(
                _flag(option.name), type=option.kind, metavar=option.metavar,
                help=f"{name}: {option.help}",
            )  # fmt: skip


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run_calibrate_heads(options: argparse.Namespace) -> int:
    """Handler of `kvtier calibrate heads`. Raises KvtierError; returns the exit code 0."""
    target = Target(share=options.share, budget=options.budget)
    samples = _sample_arguments(options)
    if options.picture is not None and not options.picture.parent.is_dir():
        raise UsageError("--picture", "a file in an existing directory", str(options.picture))
    parameters = _method_parameters(options)

    from kvtier.heads.calibrate import calibrate_heads

    with shown_progress(options.quiet) as progress:
        found = calibrate_heads(
            located(options.model_path), options.method, options.out, target=target,
            parameters=parameters, progress=progress, **samples,
        )  # fmt: skip
    if options.picture is not None:
        draw_profile(found.profile, options.picture)
    if not options.quiet:
        print("\n".join(summary(found)))
    return 0


def _sample_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `calibrate_heads` that say which samples."""
    if options.seed < 0:
        raise UsageError("--seed", "at least 0", options.seed)
    if options.samples_file is not None:
        for name in ("len", "samples"):
            if getattr(options, name) is not None:
                given = getattr(options, name)
                raise UsageError(f"--{name}", "nothing beside --samples-file", given)
        return {"samples_file": options.samples_file, "seed": options.seed}
    lengths = (options.len or DEFAULT_LENGTHS).split(",")
    return {
        "lengths": [parse_size(text, "--len") for text in lengths],
        "samples": DEFAULT_SAMPLES if options.samples is None else options.samples,
        "seed": options.seed,
    }


def _method_parameters(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of the method. Raises UsageError for those of another one."""
    parameters: dict[str, Any] = {}
    if METHODS[options.method].takes_seed:
        parameters["seed"] = options.seed
    for name, method in METHODS.items():
        given = {option.name: getattr(options, option.name) for option in method.options}
        given = {option: value for option, value in given.items() if value is not None}
        if given and name != options.method:
            raise UsageError(_flag(next(iter(given))), f"--method {name}", options.method)
        parameters |= given
    return parameters
