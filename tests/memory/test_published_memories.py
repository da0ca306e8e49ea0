"""Memories by name: what `kvtier memory publish` stores, and what a server finds there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from calibration.redis_server import RedisServer, redis_server
from small_memories import write_memory
from text_models import write_llama

from kvtier.cli import main
from kvtier.config import load_settings
from kvtier.errors import (
    CalibrationDocumentError,
    MemoryFileError,
    MemoryMismatchError,
    StoreUnavailableError,
)
from kvtier.heads.model.config import model_name, weights_revision
from kvtier.memory.published import MemoryFinder
from kvtier.memory.storage import CARD, TENSORS, load_card


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(autouse=True)
def server(shared_server, monkeypatch, tmp_path) -> RedisServer:
    shared_server.admin.flushall()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVTIER_REDIS_URL", shared_server.url)
    monkeypatch.setenv("KVTIER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("KVTIER_MEMORY", "store")
    return shared_server


@pytest.fixture
def kvtier(capsys):
    """Runs `kvtier memory`: (exit code, standard output, standard error)."""

    def run(*arguments):
        code = main(["memory", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def tools(tmp_path, model_path) -> Path:
    write_memory(model_path, tmp_path / "memories" / "tools", [5, 6, 7])
    return tmp_path / "memories" / "tools"


def find(model_path: Path):
    return MemoryFinder(load_settings(), str(model_path)).find()


def test_what_is_published_is_listed_and_found_by_servers_of_its_model(
    kvtier, server, tools, model_path, tmp_path
):
    code, out, _ = kvtier("publish", "memories/tools", "--name", "tools")
    key = (
        f"kvtier:v1:memory:{model_name(str(model_path))}:{weights_revision(str(model_path))}:tools"
    )
    assert code == 0
    assert key in out
    assert " new " in out
    card = load_card(tools)
    code, out, _ = kvtier("list")
    assert code == 0
    for cell in ("tools", "llama", "loses 0.006 nats, holds 22%", card.digest[:16], str(tools)):
        assert cell in out
    (listed,) = json.loads(kvtier("list", "--format", "json")[1])
    assert (listed["name"], listed["key"], listed["prefix"]) == ("tools", key, 3)
    assert (listed["dtype"], listed["location"]) == ("float32", str(tools))
    (place,) = find(model_path)
    assert (place.folder, place.digest, place.name) == (tools, card.digest, "tools")
    assert place.num_bytes == (tools / TENSORS).stat().st_size
    assert place.read().prefix_ids == (5, 6, 7)
    # Neither tensors nor texts nor tokens are stored.
    fields = json.loads(server.admin.get(key))
    assert set(fields) == {
        "schema_version", "model", "revision", "created_at", "name", "location", "digest",
        "prefix_digest", "prefix_tokens", "dtype", "requeue_above", "nll_gap", "held_share",
    }  # fmt: skip
    assert (fields["nll_gap"], fields["held_share"]) == (0.0061, 0.22)
    other = write_llama(tmp_path / "others" / "llama")
    (other / "model.safetensors").rename(other / "weights.safetensors")
    assert find(other) == [], "a server of other weights finds nothing"


def test_publishing_again_replaces_and_a_prefix_has_one_name(kvtier, tools, model_path):
    publish = ("publish", tools, "--name", "tools", "--format", "json")
    changes = [json.loads(kvtier(*publish)[1])[0]["change"] for _ in range(2)]
    assert changes == ["new", "unchanged"]
    write_memory(model_path, tools, [5, 6, 8])
    assert json.loads(kvtier(*publish)[1])[0]["change"] == "replaced"
    code, _, err = kvtier("publish", tools, "--name", "manuals")
    assert code == 2
    assert "--name: expected the name 'tools', under which this prefix has a memory" in err


def test_a_directory_with_another_memory_than_was_published_is_found_out(kvtier, tools, model_path):
    kvtier("publish", tools, "--name", "tools")
    (place,) = find(model_path)
    write_memory(model_path, tools, [9, 6, 7])
    with pytest.raises(MemoryMismatchError, match="was published, but the directory holds"):
        place.read()
    (tools / CARD).unlink()
    with pytest.raises(MemoryFileError, match="published prefix memory 'tools': "):
        find(model_path)


def test_withdrawing_leaves_the_directory_and_takes_the_key_of_a_name_that_two_have(
    kvtier, tools, model_path, tmp_path
):
    other = write_llama(tmp_path / "another")
    write_memory(other, tmp_path / "memories" / "other", [1, 2])
    kvtier("publish", tools, "--name", "tools")
    kvtier("publish", tmp_path / "memories" / "other", "--name", "tools")
    code, _, err = kvtier("withdraw", "tools")
    assert code == 2
    (key,) = (word for word in err.split() if ":memory:another:" in word)
    assert main(["calibration", "delete", key.rstrip(",")]) == 0
    code, out, _ = kvtier("withdraw", "tools")
    assert code == 0
    assert ":tools" in out
    assert find(model_path) == []
    assert load_card(tools)
    code, _, err = kvtier("withdraw", "tools")
    assert code == 2
    assert "NAME: expected what is published (see `kvtier memory list`), got 'tools'" in err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("memories",), "DIR: expected the directory of one prefix memory"),
        (("memories/tools", "--name", "a\nb"), "--name: expected printable text"),
        (("memories/tools", "--location", "memories"), "--location: expected an absolute path"),
    ],
)
def test_what_cannot_be_published_is_named(kvtier, server, tools, more, said):
    code, out, err = kvtier("publish", "--name", "tools", *more)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvtier: error: {said}")
    assert server.admin.dbsize() == 0


def test_what_its_card_forbids_or_what_is_damaged_is_not_published(
    kvtier, server, tools, model_path
):
    write_memory(model_path, tools, [5, 6, 7], refusals=["requests lose 1.2 nats per token"])
    code, _, err = kvtier("publish", tools, "--name", "tools")
    assert code == 2
    assert err.startswith("kvtier: error: DIR: memory ")
    assert "must not be served: requests lose 1.2 nats per token" in err
    write_memory(model_path, tools, [5, 6, 7])
    (tools / TENSORS).write_bytes((tools / TENSORS).read_bytes()[:-1] + b"x")
    code, _, err = kvtier("publish", tools, "--name", "tools")
    assert code == 2
    assert err.startswith("kvtier: error: DIR: ")
    assert server.admin.dbsize() == 0


def test_servers_may_see_the_directory_elsewhere(kvtier, tools, model_path, tmp_path):
    tools.rename(tmp_path / "mounted")
    kvtier("publish", tmp_path / "mounted", "--name", "tools", "--location", tools)
    with pytest.raises(MemoryFileError, match="'tools'"):
        find(model_path)
    (tmp_path / "mounted").rename(tools)
    assert find(model_path)[0].read().prefix_ids == (5, 6, 7)


def test_a_search_ends_by_what_cannot_be_read_and_by_a_store_that_is_away(
    kvtier, server, tools, model_path, monkeypatch, tmp_path
):
    kvtier("publish", tools, "--name", "tools")
    (key,) = server.admin.keys()
    server.admin.set(key, "no json")
    code, out, _ = kvtier("list")
    assert code == 0
    assert "invalid: document" in out
    with pytest.raises(CalibrationDocumentError, match=":tools: document, line 1:"):
        find(model_path)
    monkeypatch.setenv("KVTIER_REDIS_URL", f"unix://{tmp_path}/nobody")
    with pytest.raises(StoreUnavailableError):
        find(model_path)
    # Nothing is made to find that nobody ever stored anything.
    monkeypatch.delenv("KVTIER_REDIS_URL")
    assert find(model_path) == []
    assert not (tmp_path / "data").exists()
    # A folder is searched where one is named.
    monkeypatch.setenv("KVTIER_MEMORY", str(tools.parent))
    (place,) = find(model_path)
    assert (place.folder, place.name) == (tools, None)
    assert str(place) == str(tools)
