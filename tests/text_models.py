"""Small tokenizers with and without a chat template, and a tiny random Llama that has one."""

from __future__ import annotations

from pathlib import Path

from kvtier.synthetic.standard_library import reference_paragraphs

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nAnswer briefly.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Llama 2 does this, too: a space in front of what ends a message, and a new BOS behind it.
INSTRUCT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "<s>[INST] {{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }} </s>{% endif %}{% endfor %}"
)
# No special token ends a message.
LABELS = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 640
NO_BOS = "bytes, no BOS"
KINDS = ("bytes", "pieces", NO_BOS)


def write_tokenizer(
    folder: Path, kind: str = "bytes", template: str | None = None, eos: str = "</s>"
) -> Path:
    """Train a BPE tokenizer on prose. kind: bytes (GPT-2's way), as some are without BOS (Qwen's),
    or pieces (SentencePiece's)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    alphabet = []
    if kind != "pieces":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    numbers = " ".join(str(number) for number in range(100, 1000, 7))
    tokenizer.train_from_iterator([*reference_paragraphs()[:150], numbers, "\n\n"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None if kind == NO_BOS else "<s>",
        eos_token=eos,
        unk_token="<unk>",
        additional_special_tokens=SPECIALS[3:],
    )
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def write_llama(folder: Path, max_positions: int = 4096) -> Path:
    """A directory with a random Llama of two layers, and its tokenizer with a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder, template=CHATML, eos="<|im_end|>")
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_positions,
        # Large weights, so that what is attended to is heard in the logits.
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=SPECIALS.index("<|im_end|>"),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
