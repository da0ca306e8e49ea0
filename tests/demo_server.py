"""A server of the demo model, and what it is asked over HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from live_server import ask, free_port, serving
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_for

DEMO_MODEL = Path(__file__).resolve().parents[1] / "models" / "kvtier-demo"
# A request that ends by its length.
GREEDY = {"temperature": 0, "ignore_eos": True}


class DemoServer:
    """The server at `url`. key: of its admin, which all calls have."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self._key = {} if key is None else {"Authorization": f"Bearer {key}"}

    def call(
        self, path: str, body: Any = None, *, method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:  # fmt: skip
        """The status and the text of the answer. headers: of all calls, if others."""
        return ask(self.url + path, body, self._key if headers is None else headers, method)

    def get(self, path: str) -> str:
        status, text = self.call(path)
        assert status == 200, text
        return text

    def post(self, path: str, body: Any) -> str:
        status, text = self.call(path, body)
        assert status == 200, text
        return text

    def generate(self, input_ids: list[int], new_tokens: int, **more: Any) -> dict[str, Any]:
        sampling = {**GREEDY, "max_new_tokens": new_tokens}
        body = {"input_ids": input_ids, "sampling_params": sampling, **more}
        answer: dict[str, Any] = json.loads(self.post("/generate", body))
        return answer

    def state(self) -> dict[str, Any]:
        """Return what the engine says of itself just now; its status page may be a second old."""
        found: dict[str, Any] = json.loads(self.get("/server_info"))["internal_states"][0]["kvtier"]
        return found

    def flush(self) -> None:
        """SGLang refuses while a request is being put away, which its answer does not wait for."""
        wait_for(lambda: self.call("/flush_cache", {})[0] == 200)

    def samples(self) -> dict[str, float]:
        """Return kvtier's metrics, by name and the labels beside the model's, which all have."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics/")):
            for one in family.samples:
                if one.name.startswith("kvtier_"):
                    assert one.labels.pop("model_name") == str(DEMO_MODEL)
                    found[" ".join([one.name, *one.labels.values()])] = one.value
        return found


@contextmanager
def demo_server(folder: Path, *flags: str, key: str | None = None) -> Iterator[DemoServer]:
    """Started with these flags; its log and its data are in the folder."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "kvtier", "serve", "--model-path", str(DEMO_MODEL)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--data-dir", str(folder / "data"), *flags),
    ]
    with serving(command, port, log=folder / "server.log") as url:
        yield DemoServer(url, key)
