"""Every endpoint of SGLang's server is called on a server of kvtier's, and the server goes on; what
would end SGLang's scheduler gets a 400."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest
from demo_server import DemoServer, demo_server
from engine_process import DEMO_MODEL
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_versions import routes
from tree_harness import MiniScheduler
from waiting import SAFETY_S

from kvtier.errors import UsageError
from kvtier_sglang import hooks, requests

IDS = [7, 8, 9, 10]
SAMPLING = {"max_new_tokens": 2, "temperature": 0}
ASK = {"input_ids": IDS, "sampling_params": SAMPLING}
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
    found = {(method, one.path) for one in routes() for method in getattr(one, "methods", ())}
    return sorted(found)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no text": ("/generate", {"text": "", "sampling_params": SAMPLING}),
    "no tokens": ("/generate", {"input_ids": [], "sampling_params": SAMPLING}),
    "one of two empty": ("/generate", {"input_ids": [IDS, []], "sampling_params": SAMPLING}),
    "logprobs before the beginning": (
        "/generate",
        {**ASK, "input_ids": IDS * 25, "return_logprob": True, "logprob_start_len": -2},
    ),
    "unknown to kvtier": (
        "/generate",
        {"input_ids": IDS, "sampling_params": SAMPLING | {"custom_params": {"kvtier": {"x": 1}}}},
    ),
    "no object": (
        "/generate",
        {"input_ids": IDS, "sampling_params": SAMPLING | {"custom_params": "exact"}},
    ),
    "beams beside a share": (
        "/generate",
        {"input_ids": IDS, "sampling_params": SAMPLING | {"beam_width": 2}},
    ),
    "release": ("/release_memory_occupation", {}),
    "resume": ("/resume_memory_occupation", {}),
    # No scheduler of ours can do these.
    "experts": ("/dump_expert_distribution_record", {}),
    "experts begin": ("/start_expert_distribution_record", {}),
    "SGLang's own tier": ("/hicache/storage-backend/clear", {}),
    "a profile of the device alone": ("/start_profile", {"activities": ["MEM"]}),
}


@pytest.fixture(scope="module", params=[False, True], ids=["without a tier", "over a tier"])
def over_a_tier(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def server(over_a_tier: bool, tmp_path_factory: Any) -> Iterator[DemoServer]:
    flags = ["--max-total-tokens", "4096", "--retention", "0.5"]
    flags += ["--tier", "local:7311"] if over_a_tier else []
    with demo_server(tmp_path_factory.mktemp("server"), *flags) as started:
        yield started


def call(server: DemoServer, method: str, path: str, body: dict[str, Any]) -> int:
    """The status. Raises OSError where nobody answers."""
    path = path.replace(":path}", "}").replace("{model}", "m").replace("{response_id}", "x")
    sent = None if method in ("GET", "HEAD") else body
    status, _ = server.call(path, sent, method=method)
    return status


@contextmanager
def running(server: DemoServer) -> Iterator[None]:
    """Have a request run within this context, whose client reads what it is sent and then leaves.

    It ends by itself, too: an endpoint that changes weights waits for it.
    """
    sampling = {"max_new_tokens": 100, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": IDS * 8, "sampling_params": sampling, "stream": True}
    request = Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
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


@pytest.mark.engine
def test_the_server_lives_on_after_every_endpoint(server: DemoServer, over_a_tier: bool) -> None:
    """While it is idle, and over a tier while a request runs."""
    called = endpoints()
    assert len(called) > 100
    assert set(BODIES) <= {path for _, path in called}
    for method, path in called:
        for body in ({}, BODIES.get(path)):
            if body is None:
                continue
            with running(server) if over_a_tier else nullcontext():
                assert 200 <= call(server, method, path, body) < 600
                if path in ENDED_BY:
                    call(server, "POST", ENDED_BY[path], {})
            after = call(server, "POST", "/generate", ASK)
            assert after == 200, f"after {method} {path} {body}: {after}"


@pytest.mark.engine
def test_a_request_that_would_end_the_scheduler_is_refused(server: DemoServer) -> None:
    for name, (path, body) in REFUSED.items():
        status, text = server.call(path, body)
        assert status == 400, name
        if path.startswith(("/generate", "/release", "/resume")):
            assert json.loads(text)["error"]["message"], name
        assert server.generate(IDS, 2)["meta_info"]["completion_tokens"] == 2, name


def manager(backend: str = "kvtier", *, is_mrope: bool = False) -> SimpleNamespace:
    args = SimpleNamespace(
        attention_backend=backend, radix_cache_backend=None, model_path=str(DEMO_MODEL)
    )
    return SimpleNamespace(server_args=args, model_config=SimpleNamespace(model_is_mrope=is_mrope))


def test_pictures_that_turn_keys_are_refused_where_keys_are_compared(monkeypatch):
    asked = GenerateReqInput(input_ids=IDS, image_data=["a picture"])
    requests.check_request(manager(is_mrope=True), asked, IDS)
    monkeypatch.setenv("KVTIER_RETENTION", "0.5")
    with pytest.raises(UsageError, match=r"^image_data: expected text alone"):
        requests.check_request(manager(is_mrope=True), asked, IDS)
    requests.check_request(manager(is_mrope=True), GenerateReqInput(input_ids=IDS), IDS)
    requests.check_request(manager(), asked, IDS)


@pytest.mark.parametrize(
    ("shape", "refused"),
    [({"packs": False}, False), ({}, True), ({"packs": False, "memory": IDS}, True)],
    ids=["nothing is compressed", "a share", "a memory"],
)
def test_beams_are_refused_where_attention_reads_rows_that_they_do_not_have(shape, refused):
    coordinator = SimpleNamespace(token_to_kv_pool_allocator=MiniScheduler(**shape).allocator)
    req = SimpleNamespace(sampling_params=SamplingParams(beam_width=2))
    said = hooks.refuse_beams(lambda *args: None, coordinator, req, None)
    expected = "beam_width: expected 1 beside a share, a head profile or a memory, got 2"
    assert said == (expected if refused else None)


def test_a_server_without_kvtier_is_left_as_it_is():
    asked = SimpleNamespace(return_logprob=True, logprob_start_len=-5)
    requests.check_request(manager("torch_native"), asked, [])
    requests.refuse_offload(manager("torch_native"))
