"""Write a training checkpoint as a model folder that transformers and SGLang load.

python -m models.export build/demo-model/span-136k.pt models/kvtier-demo
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from kvtier.synthetic.recall import DEFAULT_LANGUAGE
from models.network.net import Net, NetConfig, save_net
from models.recipe import SEED
from models.tokenizer import write_tokenizer

HISTORY = "history.json"  # the log of all training steps, in the model's folder


def export(checkpoint: dict[str, Any], folder: Path) -> None:
    """Write the weights of `checkpoint`, and all that goes with them, into `folder`."""
    language = DEFAULT_LANGUAGE
    net = Net(NetConfig(vocab_size=language.vocab_size))
    net.load_state_dict(checkpoint["net"])
    special = {
        "pad_token_id": language.pad,
        "bos_token_id": language.bos,
        "eos_token_id": language.eot,
    }
    save_net(net, folder, special)
    write_tokenizer(folder, net.config.max_positions)
    history = {"seed": SEED, "torch": torch.__version__, "steps": checkpoint["log"]}
    (folder / HISTORY).write_text(json.dumps(history, indent=1) + "\n")


if __name__ == "__main__":
    export(torch.load(sys.argv[1], weights_only=False), Path(sys.argv[2]))
