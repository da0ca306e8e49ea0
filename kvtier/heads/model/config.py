"""The facts of a model that kvtier needs, from its config.json alone, before anything loads."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvtier.errors import UnsupportedModelError, UsageError
from kvtier.heads.model.support import check_supported, text_config, windows_of
from kvtier.heads.profile import ModelShape
from kvtier.reading import read_json


def folder_of(model_path: str, revision: str | None = None) -> Path | None:
    """The folder of a model on this machine: the directory itself, or a hub id's snapshot in the
    hub's cache, whole or not, of the default revision or of `revision`. None where there is none;
    nothing is downloaded."""
    path = Path(model_path)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        return Path(snapshot_download(model_path, revision=revision, local_files_only=True))
    except (ImportError, HFValidationError):
        return None
    except LocalEntryNotFoundError as error:
        # Newer libraries refuse a snapshot without the files that no server reads, as the readme.
        there = getattr(error, "snapshot_path", None)
        return None if there is None else Path(there)


# The files of a model that are downloaded: weights, configuration, tokenizer.
_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]


def located(model_path: str, revision: str | None = None) -> str:
    """The folder of a model, whatever names it. A hub id whose weights are not in the hub's cache
    is downloaded, where there are safetensors of it. revision: the hub's name for the snapshot that
    is wanted. Raises UsageError for what is no folder and cannot be downloaded."""
    folder = folder_of(model_path, revision)
    if folder is not None and (Path(model_path).is_dir() or _has_weights(folder)):
        return str(folder)
    reason: object = "no weights as safetensors"
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model_path, revision=revision, allow_patterns=_FILES))
        if _has_weights(folder):
            return str(folder)
    # The hub's library raises these for a bad id, an unknown or gated model and a dead network.
    except (ImportError, ValueError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    expected = f"a directory, or a hub id that is cached or can be downloaded ({reason})"
    raise UsageError("--model-path", expected, model_path)


def _has_weights(folder: Path) -> bool:
    """Return whether a snapshot has all weights; one that was downloaded by half has not."""
    files = {file.name for file in folder.iterdir()}
    index = folder / "model.safetensors.index.json"
    if index.name in files:
        shards = json.loads(index.read_text())["weight_map"].values()
        return files.issuperset(shards)
    return any(name.endswith((".safetensors", ".bin")) for name in files)


def read_config(model_path: str) -> dict[str, Any]:
    """The config.json of a model on this machine, the text part of multimodal ones.

    model_path: a directory, or a hub id that is in the hub's cache. Raises UsageError when there is
    none that can be read.
    """
    folder = folder_of(model_path)
    if folder is None:
        expected = "a directory with a readable config.json, or a hub id in the hub's cache"
        raise UsageError("--model-path", expected, model_path)
    return text_config(read_json(folder / "config.json", "--model-path", finite=False))


def model_shape(config: dict[str, Any]) -> ModelShape:
    """The head layout of a configuration. Raises UnsupportedModelError when it names none."""
    try:
        num_heads = int(config["num_attention_heads"])
        return ModelShape(
            num_layers=int(config["num_hidden_layers"]),
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            num_attention_heads=num_heads,
            head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            "--model-path", "a transformer configuration with attention heads", str(error)
        ) from error


def shape_of(model: Any) -> ModelShape:
    """Head layout of a loaded model, some layers of which may have a window. Raises
    UnsupportedModelError when it cannot be split."""
    config = model.config.get_text_config().to_dict()
    check_supported(config, windows=True)
    return model_shape(config)


def layer_windows(model: Any) -> tuple[int | None, ...]:
    """Return for each layer of a loaded model how many of its newest tokens it attends to; None:
    all."""
    windows = windows_of(model.config.get_text_config().to_dict())
    return windows or (None,) * shape_of(model).num_layers


def layer_sinks(model: Any) -> dict[int, Any]:
    """Return the logits of attending to nothing (attention sinks), `[KV heads, group]`, of the
    layers of a loaded model whose heads may do that."""
    heads = shape_of(model).num_kv_heads
    return {
        module.layer_idx: module.sinks.view(heads, -1)
        for module in model.modules()
        if hasattr(module, "sinks") and hasattr(module, "layer_idx")
    }


def full_layers(model: Any) -> list[int]:
    """The layers of a loaded model that attend to everything."""
    return [layer for layer, window in enumerate(layer_windows(model)) if window is None]


def context_length(config: dict[str, Any]) -> int:
    """Longest position the model was made for, in tokens."""
    return int(config.get("max_position_embeddings") or 0)


def model_name(model_path: str) -> str:
    """Return the name of a model in profiles and curves: the directory's name, or the hub id."""
    path = Path(model_path)
    if not path.is_dir():
        return model_path
    path = path.resolve()
    # A snapshot in the hub's cache: models--ORGANISATION--NAME/snapshots/REVISION.
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name


def weights_revision(model_path: str, revision: str | None = None) -> str | None:
    """A digest of a model's safetensors files: sha256 over names and contents, 16 hex digits. None
    when there are none on this machine (a hub id that is not in the cache, another format).

    revision: the hub's name for the snapshot that is wanted

    The files are read once: the digest is remembered in the user's cache (XDG_CACHE_HOME) for as
    long as their sizes and times stay what they are.
    """
    folder = folder_of(model_path, revision)
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    if folder is None or not files:
        return None
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    memory = cache / "kvtier" / "weights" / f"{place}.json"
    # The state is that of the files themselves, where the hub's cache has links to them.
    stats = [(file.name, file.stat()) for file in files]
    seen = [[name, one.st_size, one.st_mtime_ns, one.st_ino] for name, one in stats]
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(memory.read_text())
        if known["files"] == seen:
            return str(known["revision"])
    found = _digest(files)
    # A cache that cannot be written costs time only.
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        written = memory.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({"files": seen, "revision": found}))
        written.replace(memory)
    return found


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()[:16]
