"""A model that is named by a hub id is downloaded where it is not on this machine. The hub's own
library asks a local server, which answers as the hub does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from waiting import SAFETY_S

from kvtier.errors import UsageError
from kvtier.heads.model.config import located

MODEL = Path(__file__).resolve().parents[2] / "models" / "kvtier-demo"
HUB_ID = "someone/demo"
COMMIT = "c" * 40


class Hub(BaseHTTPRequestHandler):
    """One model at one commit. files: by name; asked: which of them were sent"""

    def __init__(self, files: dict[str, bytes], asked: list[str], *rest: Any) -> None:
        self.files, self.asked = files, asked
        super().__init__(*rest)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == f"/api/models/{HUB_ID}/revision/main":
            self._send(json.dumps({"id": HUB_ID, "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/{HUB_ID}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                for name, data in self.files.items()
            ]
            self._send(json.dumps(tree).encode())
        elif (name := path.removeprefix(f"/{HUB_ID}/resolve/{COMMIT}/")) in self.files:
            if self.command == "GET":
                self.asked.append(name)
            self._send(self.files[name])
        else:
            self._send(b"", status=404, error="RepoNotFound")

    do_HEAD = do_GET  # noqa: N815

    def _send(self, body: bytes, *, status: int = 200, error: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{_digest(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error is not None:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[tuple[str, dict[str, bytes], list[str]]]:
    """A hub with the demo model, and a readme: its address, its files and what was asked of it."""
    files = {file.name: file.read_bytes() for file in MODEL.iterdir() if file.is_file()}
    files["README.md"] = b"no server reads this"
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, files, asked))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", files, asked
    server.shutdown()
    server.server_close()


def run(url: str, home: Path, program: str) -> Any:
    """Return the JSON that a program prints. The hub's library reads the environment when it is
    imported, so it is a process of its own."""
    environment = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, capture_output=True, text=True, timeout=SAFETY_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_hub_id_is_downloaded_once_and_found_again_without_the_hub(hub, tmp_path):
    url, files, asked = hub
    program = f"""
import json
from kvtier.heads.model.config import located, model_name, weights_revision
folder = located({HUB_ID!r})
print(json.dumps([folder, model_name(folder), weights_revision({HUB_ID!r})]))
"""
    folder, name, revision = run(url, tmp_path, program)
    assert name == HUB_ID
    assert revision is not None
    there = {file.name for file in Path(folder).iterdir()}
    assert "model.safetensors" in there
    assert "README.md" not in there
    assert all((Path(folder) / one).read_bytes() == files[one] for one in there)
    assert sorted(asked) == sorted(there)
    # Nobody listens there.
    assert run("http://127.0.0.1:9", tmp_path, program) == [folder, name, revision]


def test_what_was_downloaded_by_half_is_completed(hub, tmp_path):
    url, files, asked = hub
    weights = files.pop("model.safetensors")
    shards = {"a.safetensors": weights[:9], "b.safetensors": weights[9:]}
    index = {"weight_map": {"one": "a.safetensors", "two": "b.safetensors"}}
    files |= shards | {"model.safetensors.index.json": json.dumps(index).encode()}
    half = "allow_patterns=['*.json', 'a.safetensors']"
    program = f"""
import json
from huggingface_hub import snapshot_download
from kvtier.heads.model.config import folder_of, located
snapshot_download({HUB_ID!r}, {half})
print(json.dumps([str(folder_of({HUB_ID!r})), located({HUB_ID!r})]))
"""
    half_there, whole = run(url, tmp_path, program)
    assert half_there == whole
    assert asked.count("a.safetensors") == asked.count("b.safetensors") == 1
    assert all((Path(whole) / name).read_bytes() == data for name, data in shards.items())


def test_what_cannot_be_had_is_refused_with_the_reason(hub, tmp_path):
    url, files, _ = hub
    del files["model.safetensors"]
    program = """
import json
from kvtier.errors import UsageError
from kvtier.heads.model.config import located
said = []
for name in ("someone/demo", "someone/nothing"):
    try:
        located(name)
    except UsageError as error:
        said.append(str(error))
print(json.dumps(said))
"""
    no_weights, unknown = run(url, tmp_path, program)
    assert no_weights == (
        "--model-path: expected a directory, or a hub id that is cached or can be downloaded "
        "(no weights as safetensors), got 'someone/demo'"
    )
    assert "404" in unknown
    assert unknown.endswith("got 'someone/nothing'")
    with pytest.raises(UsageError, match=r"^--model-path: expected a directory, or a hub id"):
        located(str(tmp_path / "not" / "there"))
