"""Write a training checkpoint as a model folder that transformers and SGLang load.

python -m models.export build/demo-model/span-136k.pt models/kvtier-demo
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from kvtier.synthetic.recall import DEFAULT_LANGUAGE, NUM_CODES
from kvtier.synthetic.words import SPECIALS
from models.net import Net, NetConfig, save_net
from models.recipe import SEED

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


# The context goes into a system message, which has no marker of its own: the rendered text is then
# what `kvtier.synthetic.recall` writes. A tool call is written as the answer that it was read from.
CHAT_TEMPLATE = (
    "{%- if not messages[0]['content'].startswith(bos_token) %}{{ bos_token + ' ' }}{% endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{{ message['content'] + ' ' }}"
    "{%- elif message['role'] == 'user' %}{{ '<user> ' + message['content'] + ' ' }}"
    "{%- elif message['role'] == 'tool' %}{{ '<tool> ' + message['content'] + ' ' }}"
    "{%- elif message['role'] == 'assistant' %}"
    "{{ '<assistant> ' }}{% if message['content'] %}{{ message['content'] + ' ' }}{% endif %}"
    "{%- for call in message['tool_calls'] or [] %}{% set given = call['function']['arguments'] %}"
    "{{ given['vault'] + ' ' + given['codes'] + ' ' }}{% endfor %}{{ eos_token + ' ' }}"
    "{%- else %}{{ raise_exception('roles are system, user, tool and assistant') }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
# Where a request has tools, an answer is a call of `open_vault`: SGLang reads it by this
# (`--tool-call-parser auto`), as it reads other models' calls out of what they write.
RESPONSE_TEMPLATE = {
    "start_anchor": "<assistant>",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"\s*(?P<vault>[a-z]+ [a-z]+) "
            rf"(?P<codes>k\d\d(?: k\d\d){{{NUM_CODES - 1}}})",
            "transform": {
                "type": "function",
                "function": {
                    "name": "open_vault",
                    "arguments": {"vault": "{vault}", "codes": "{codes}"},
                },
            },
        },
    },
}


def write_tokenizer(folder: Path, max_tokens: int = 139264) -> None:
    """Write the tokenizer and generation settings into `folder`."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    language = DEFAULT_LANGUAGE
    # No decoder is set: decoding then joins the words with spaces, which is what we want.
    tokenizer = Tokenizer(models.WordLevel(dict(language.ids), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eot>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "response_template": RESPONSE_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    generation = {
        "bos_token_id": language.bos,
        "eos_token_id": language.eot,
        "pad_token_id": language.pad,
        "do_sample": False,
        "max_new_tokens": 16,
    }
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    export(torch.load(sys.argv[1], weights_only=False), Path(sys.argv[2]))
