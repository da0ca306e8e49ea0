"""Every endpoint of SGLang's server is called on a server of kvtier's, and the server goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from engine_process import DEMO_MODEL
from live_server import free_port, serving
from waiting import SAFETY_S

pytestmark = pytest.mark.engine

IDS = [7, 8, 9, 10]
TWO_TOKENS = {"max_new_tokens": 2, "temperature": 0}
ASK = {"input_ids": IDS, "sampling_params": TWO_TOKENS}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
# Bodies with which an endpoint reaches the scheduler, or whatever else is behind it. Every endpoint
# is also called with an empty one.
BODIES: dict[str, dict[str, Any]] = {
    "/abort_request": {"rid": "x"},
    "/classify": {"input_ids": IDS},
    "/close_session": {"session_id": "x"},
    "/detokenize": {"model": "m", "tokens": IDS},
    "/encode": {"input_ids": IDS},
    "/generate": ASK,
    "/get_weights_by_name": {"name": "model.embed_tokens.weight"},
    "/invocations": CHAT,
    "/load_lora_adapter": {"lora_name": "x", "lora_path": "/nowhere"},
    "/open_session": {"capacity_of_str_len": 1000},
    "/pause_generation": {"mode": "retract"},
    "/set_internal_state": {"server_args": {}},
    "/start_profile": {"activities": ["CPU", "MEM"]},
    "/tokenize": {"model": "m", "prompt": "x"},
    "/unload_lora_adapter": {"lora_name": "x"},
    "/update_weight_version": {"new_version": "2"},
    "/update_weights_from_disk": {"model_path": str(DEMO_MODEL)},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": IDS, "max_tokens": 2},
    "/v1/embeddings": {"model": "m", "input": IDS},
    "/v1/messages": CHAT,
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/score": {"query": IDS, "items": [[9], [10]], "label_token_ids": [5, 6], "model": "m"},
    "/vertex_generate": {"instances": [ASK]},
}
# An endpoint that begins something, and the one that ends it.
ENDED_BY = {"/pause_generation": "/continue_generation", "/start_profile": "/stop_profile"}


def endpoints() -> list[tuple[str, str]]:
    """(method, path) of every endpoint."""
    from sglang.srt.entrypoints.http_server import app

    # FastAPI keeps what was included as one route of many.
    included = [getattr(route, "original_router", None) for route in app.routes]
    routes = [*app.routes, *(one for router in included if router for one in router.routes)]
    return sorted({(method, one.path) for one in routes for method in getattr(one, "methods", ())})


@pytest.fixture(scope="module", params=["", "local"], ids=["without a tier", "with a tier"])
def server(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    command = [
        *(sys.executable, "-m", "kvtier", "serve", "--model-path", str(DEMO_MODEL)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-total-tokens", "4096", "--data-dir", str(folder)),
        *("--retention", "0.5", *(["--tier", request.param] if request.param else [])),
    ]
    with serving(command, port, log=folder / "server.log") as url:
        yield url


def call(url: str, method: str, path: str, body: dict[str, Any]) -> int:
    """The status. Raises OSError where nobody answers."""
    path = path.replace(":path}", "}").replace("{model}", "m").replace("{response_id}", "x")
    data = None if method in ("GET", "HEAD") else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    try:
        with urlopen(Request(url + path, data, headers, method=method), timeout=SAFETY_S) as answer:
            answer.read()
            return int(answer.status)
    except HTTPError as error:
        return error.code


@contextmanager
def running(url: str) -> Iterator[None]:
    """Have a request run within this context, whose client reads what it is sent and then leaves.

    It ends by itself, too: an endpoint that changes weights waits for it.
    """
    sampling = {"max_new_tokens": 100, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": IDS * 8, "sampling_params": sampling, "stream": True}
    request = Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    left = Event()

    def read(stream: Any) -> None:
        with stream:
            while not left.is_set() and stream.readline():
                pass

    stream = urlopen(request, timeout=SAFETY_S)
    assert stream.readline()
    reader = Thread(target=read, args=(stream,))
    reader.start()
    yield
    left.set()
    reader.join()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "while a request runs"])
def test_the_server_lives_on_after_every_endpoint(server: str, busy: bool) -> None:
    called = endpoints()
    assert len(called) > 100
    assert set(BODIES) <= {path for _, path in called}
    for method, path in called:
        for body in ({}, BODIES.get(path)):
            if body is None:
                continue
            with running(server) if busy else nullcontext():
                assert 200 <= call(server, method, path, body) < 600
                if path in ENDED_BY:
                    call(server, "POST", ENDED_BY[path], {})
            after = call(server, "POST", "/generate", ASK)
            assert after == 200, f"after {method} {path} {body}: {after}"


def test_what_no_scheduler_of_ours_can_do_is_refused(server: str) -> None:
    for path, body in (
        ("/dump_expert_distribution_record", {}),
        ("/start_expert_distribution_record", {}),
        ("/hicache/storage-backend/clear", {}),
        ("/start_profile", {"activities": ["MEM"]}),
    ):
        assert call(server, "POST", path, body) == 400
