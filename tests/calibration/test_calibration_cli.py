"""`kvtier calibration`: what is printed, what is written, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from calibration_samples import curve_document, memory_document, profile_document

from kvtier.calibration.store import transfer
from kvtier.cli import main


@pytest.fixture
def kvtier(server, monkeypatch, capsys):
    """Runs a command on the shared server: (exit code, standard output, standard error)."""
    monkeypatch.setenv("KVTIER_REDIS_URL", server.url)

    def run(*arguments):
        code = main(["calibration", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_list_says_what_how_good_how_old_and_for_how_long(kvtier, server, store):
    assert kvtier("list", "--format", "json") == (0, "[]\n", "")
    store.put(curve_document(created_at="2026-01-01T00:00:00Z"))
    store.put(profile_document())
    store.put(memory_document())
    store.put(memory_document(name="new", nll_gap=None, held_share=None))
    code, out, _ = kvtier("list")
    assert code == 0
    curve, unmeasured, memory, profile = (line for line in out.splitlines() if ":v1:" in line)
    for line, cells in (
        (curve, ("curve", "org/model:7b", "compactor-32", " d ", "17 min")),
        (curve, ("rmse 0.000, held out 0.030",)),
        (memory, ("memory", "loses 0.006 nats, holds 22%", ":tools ")),
        (unmeasured, ("not measured", ":new ")),
        (profile, ("profile", "0123456789abcdef", "0.0% of heads")),
    ):
        assert all(cell in line for cell in cells)
    # It is as old as this test.
    assert re.search(r" \d+ (s|min) ", profile)
    rows = json.loads(kvtier("list", "--format", "json")[1])
    assert [row["kind"] for row in rows] == ["curve", "memory", "memory", "profile"]
    assert rows[0]["key"] == str(curve_document().key)
    assert rows[0]["age_s"] > 86400
    assert 500 < rows[3]["ttl_s"] <= 1000
    # One that cannot be read is listed as such.
    server.admin.set(str(curve_document().key), "no json")
    code, out, _ = kvtier("list")
    assert code == 0
    assert "invalid: document" in out
    assert kvtier("show", curve_document().key)[0] == 2
    assert kvtier("delete", curve_document().key)[0] == 0


def test_show_prints_the_document(kvtier, store):
    key = store.put(curve_document())
    code, out, _ = kvtier("show", key)
    assert code == 0
    assert json.loads(out) == store.get(key).model_dump(mode="json")
    assert out.count("\n") > 10
    assert '"compactor-32"' in kvtier("show", key, "--format", "table")[1]


def test_what_is_exported_can_be_imported(kvtier, server, store, tmp_path):
    documents = [curve_document(), profile_document(), memory_document()]
    keys = [store.put(document) for document in documents]
    file = tmp_path / "all.json"
    code, out, _ = kvtier("export", file)
    assert code == 0
    assert all(str(key) in out for key in keys)
    assert [path.name for path in tmp_path.iterdir()] == ["all.json"]
    assert kvtier("export", tmp_path / "one.json", keys[1])[0] == 0
    assert list(json.loads((tmp_path / "one.json").read_text())["documents"]) == [str(keys[1])]
    server.admin.flushall()
    assert kvtier("import", file)[1].count(" new ") == 3
    assert [store.get(key) for key in keys] == documents
    changed = curve_document(r2=0.5)
    store.put(changed)
    outcome = json.loads(kvtier("import", file, "--format", "json")[1])
    assert {row["change"] for row in outcome} == {"replaced", "unchanged"}
    assert store.get(changed.key) == documents[0]
    # One bad document, and nothing is written.
    content = json.loads(file.read_text())
    content["documents"][str(keys[1])]["profile"]["ca_heads"] = [[9], []]
    file.write_text(json.dumps(content))
    server.admin.flushall()
    code, out, err = kvtier("import", file)
    assert (code, out) == (2, "")
    assert "all.json" in err
    assert "profile" in err
    assert server.admin.dbsize() == 0


def test_more_than_a_file_may_hold_is_exported_key_by_key(kvtier, store, tmp_path, monkeypatch):
    keys = [store.put(curve_document(policy=f"p{index}")) for index in range(2)]
    one, both = tmp_path / "one.json", tmp_path / "both.json"
    assert kvtier("export", one, keys[0])[0] == 0
    monkeypatch.setattr(transfer, "MAX_EXPORT_BYTES", one.stat().st_size)
    code, _, err = kvtier("export", both)
    assert code == 2
    assert err.startswith("kvtier: error: KEY: expected one key of several")
    assert [file.name for file in tmp_path.glob("both*")] == []
    assert kvtier("export", one, keys[1])[0] == 0
    assert kvtier("import", one)[0] == 0


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"schema_version": 2, "documents": {}}',
        '{"schema_version": 1, "documents": 3}',
        '{"schema_version": 1, "documents": {"no key": {}}}',
    ],
)
def test_what_is_no_export_is_refused(kvtier, tmp_path, content):
    (tmp_path / "bad.json").write_text(content)
    code, _, err = kvtier("import", tmp_path / "bad.json")
    assert code == 2
    where = ("FILE", f"{tmp_path / 'bad.json'}, line 1")
    assert err.startswith(tuple(f"kvtier: error: {one}: expected" for one in where))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["show", "no-key"], "KEY: expected kvtier:v1:curve"),
        (["show", "kvtier:v1:profile:a:b"], "KEY: expected a stored key"),
        (["delete", "kvtier:v1:profile:a:b"], "KEY: expected stored keys"),
        (["export", "nowhere/file.json"], "FILE: expected a file in an existing directory"),
        (["export", "."], "FILE: expected a writable file"),
        (["export", "x.json", "kvtier:v1:profile:a:b"], "KEY: expected a stored key"),
        (["import", "nowhere.json"], "FILE: expected"),
    ],
)
def test_mistakes_are_named(kvtier, arguments, text):
    code, _, err = kvtier(*arguments)
    assert code == 2
    assert err.startswith(f"kvtier: error: {text}")


def test_deleting_several_deletes_those_that_are_there(kvtier, store):
    keys = [store.put(curve_document()), store.put(profile_document())]
    code, out, err = kvtier("delete", *keys, "kvtier:v1:profile:a:b", "--format", "json")
    assert code == 2
    assert [row["deleted"] for row in json.loads(out)] == [str(key) for key in keys]
    assert "kvtier:v1:profile:a:b" in err
    assert store.list() == ()


def test_it_works_without_torch_and_without_a_redis(tmp_path):
    """Files, in an interpreter that cannot import torch, sglang or matplotlib."""
    script = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'sglang', 'matplotlib', 'scipy'):\n"
        "    sys.modules[name] = None\n"
        "from kvtier.cli import main\n"
        "main(['calibration', 'list', '--format', 'json'])\n"
        "sys.exit(main(['calibration', 'export', 'e.json']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[]\n")
    assert json.loads((tmp_path / "e.json").read_text())["documents"] == {}
