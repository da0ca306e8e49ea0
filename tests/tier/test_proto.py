"""The protocol: what is generated from it is what is committed, and it is clean."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PROTO = "kvtier/v1/tier.proto"
GENERATED = ["tier_pb2.py", "tier_pb2.pyi", "tier_pb2_grpc.py", "tier_pb2_grpc.pyi"]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_stubs_are_what_the_protocol_generates(tmp_path):
    pytest.importorskip("grpc_tools")
    outputs = [
        f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")
    ]
    done = run(sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *outputs, f"proto/{PROTO}")
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_bytes() for path in (tmp_path / "kvtier" / "v1").iterdir()}
    assert sorted(made) == sorted(GENERATED)
    for name, content in made.items():
        committed = (ROOT / "kvtier" / "v1" / name).read_bytes()
        assert committed == content, f"{name} is not fresh: run `make proto`"


@pytest.mark.parametrize("command", [("lint",), ("format", "--diff", "--exit-code")])
def test_the_protocol_is_clean(command):
    buf = BIN / "buf"
    if not buf.exists():
        pytest.skip("buf is not installed next to this Python")
    done = run(buf, *command, "proto")
    assert done.returncode == 0, done.stdout + done.stderr
