"""Requests that would end SGLang's scheduler get a 400 over HTTP, and the server goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from engine_process import DEMO_MODEL
from live_server import free_port, serving
from sglang.srt.managers.io_struct import GenerateReqInput
from waiting import SAFETY_S

from kvtier.errors import UsageError
from kvtier_sglang import requests

SAMPLING = {"max_new_tokens": 2, "temperature": 0}
IDS = [7, 8, 9, 10]
REFUSED = {
    "no text": ("/generate", {"text": "", "sampling_params": SAMPLING}),
    "no tokens": ("/generate", {"input_ids": [], "sampling_params": SAMPLING}),
    "one of two empty": ("/generate", {"input_ids": [IDS, []], "sampling_params": SAMPLING}),
    "logprobs before the beginning": (
        "/generate",
        {
            "input_ids": IDS * 25,
            "return_logprob": True,
            "logprob_start_len": -2,
            "sampling_params": SAMPLING,
        },
    ),
    "unknown to kvtier": (
        "/generate",
        {"input_ids": IDS, "sampling_params": SAMPLING | {"custom_params": {"kvtier": {"x": 1}}}},
    ),
    "release": ("/release_memory_occupation", {}),
    "resume": ("/resume_memory_occupation", {}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    command = [
        *(sys.executable, "-m", "kvtier", "serve", "--model-path", str(DEMO_MODEL)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-total-tokens", "4096", "--data-dir", str(folder)),
    ]
    with serving(command, port, log=folder / "server.log") as url:
        yield url


def post(url: str, body: dict) -> tuple[int, dict]:
    """Status and answer."""
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=SAFETY_S) as reply:
            return reply.status, json.load(reply)
    except HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.engine
@pytest.mark.parametrize("asked", REFUSED)
def test_a_request_that_would_end_the_scheduler_is_refused(server, asked):
    path, body = REFUSED[asked]
    status, answer = post(server + path, body)
    assert status == 400
    assert answer["error"]["message"]
    status, answer = post(f"{server}/generate", {"input_ids": IDS, "sampling_params": SAMPLING})
    assert status == 200
    assert answer["meta_info"]["completion_tokens"] == 2


def manager(backend: str = "kvtier") -> SimpleNamespace:
    args = SimpleNamespace(
        attention_backend=backend, radix_cache_backend=None, model_path=str(DEMO_MODEL)
    )
    model = SimpleNamespace(model_is_mrope=False)
    return SimpleNamespace(server_args=args, model_config=model)


def test_prompt_logprobs_begin_at_a_token_or_with_the_answer():
    for start in (-1, 0, 3):
        asked = SimpleNamespace(return_logprob=True, logprob_start_len=start)
        requests.check_request(manager(), asked, IDS)
    asked.logprob_start_len = -2
    with pytest.raises(UsageError, match=r"^logprob_start_len: expected a position, or -1"):
        requests.check_request(manager(), asked, IDS)


def test_pictures_that_turn_keys_are_refused_where_keys_are_compared(monkeypatch):
    asked, server = GenerateReqInput(input_ids=IDS, image_data=["a picture"]), manager()
    server.model_config.model_is_mrope = True
    requests.check_request(server, asked, IDS)
    monkeypatch.setenv("KVTIER_RETENTION", "0.5")
    server = manager()
    server.model_config.model_is_mrope = True
    with pytest.raises(UsageError, match=r"^image_data: expected text alone"):
        requests.check_request(server, asked, IDS)
    requests.check_request(server, GenerateReqInput(input_ids=IDS), IDS)
    server.model_config.model_is_mrope = False
    requests.check_request(server, asked, IDS)


def test_a_server_without_kvtier_is_left_as_it_is():
    asked = SimpleNamespace(return_logprob=True, logprob_start_len=-5)
    requests.check_request(manager("torch_native"), asked, [])
    requests.refuse_offload(manager("torch_native"))
