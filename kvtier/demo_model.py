"""The place of the demo model: a wheel carries it, and a checkout has it beside the package.

`python -m kvtier.demo_model` prints it, as in
`kvtier serve --model-path "$(python -m kvtier.demo_model)" --dtype float32 --port 30000`.
"""

from __future__ import annotations

from pathlib import Path

from kvtier.errors import UsageError

# The path is inside the package in a wheel (`sources` in pyproject.toml), and beside it in a
# checkout.
PLACE = "models/kvtier-demo"


def find_demo_model() -> Path:
    """The demo model's directory, relative where it is below the working directory. Raises
    UsageError where a package was made without it."""
    package = Path(__file__).resolve().parent
    for folder in (package, package.parent):
        found = folder / PLACE
        if (found / "config.json").is_file():
            here = Path.cwd()
            return found.relative_to(here) if found.is_relative_to(here) else found
    expected = "a model directory; this installation lacks the demo model, which wheels carry"
    raise UsageError("--model-path", expected, str(package / PLACE))


if __name__ == "__main__":
    print(find_demo_model())
