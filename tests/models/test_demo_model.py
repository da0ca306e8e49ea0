"""Gates of the stored demo model: what is not true of these weights must not be shown with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.heads.profile import load_profile
from kvtier.synthetic.recall import DEFAULT_LANGUAGE, make_session, score_answer
from models.evaluate import all_heads, head_mask, make_probe, measure, random_heads
from models.export import write_tokenizer
from models.longcontext import prefill, turn_hidden
from models.net import Net, load_net
from models.nll import nll_by_class

FOLDER = Path(__file__).resolve().parents[2] / "models" / "kvtier-demo"
SEED = 4321


@pytest.fixture(scope="module")
def net() -> Net:
    return load_net(FOLDER)


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def test_the_full_cache_recalls_and_the_best_heads_nearly_as_well(net):
    profile = load_profile(FOLDER / "head_profile.json")
    best_heads = [(layer, head) for layer, heads in enumerate(profile.ca_heads) for head in heads]
    probes = [make_probe(net, SEED + index, 4096, 20) for index in range(4)]
    full = measure(net, probes, all_heads(net)).codes
    best = measure(net, probes, best_heads).codes
    draws = random_heads(net, len(best_heads), draws=6, seed=SEED)
    chance = np.mean([measure(net, probes, heads).codes for heads in draws])
    assert full >= 0.95
    assert best >= 0.98 * full
    assert chance < best - 0.3
    assert measure(net, probes, []).codes < 0.25


def test_an_invented_answer_is_given_again_when_asked_again(net):
    """Greedy decoding; the model must repeat its own first answer."""
    scores = []
    for seed in range(SEED, SEED + 4):
        session = make_session(np.random.default_rng(seed), 1024, 6, 24, invented_share=0.7)
        answers = generate_answers(net, session)
        for turn, got in zip(session.turns, answers, strict=True):
            if turn.refers_to_turn is not None:
                scores.append(score_answer(turn.expected(answers), got))
    assert len(scores) >= 6
    assert np.mean(scores) >= 0.8


def generate_answers(net: Net, session) -> list[list[int]]:
    """Greedy answers without `<eot>`, at most 16 tokens each."""
    cache = prefill(net, torch.from_numpy(session.context_ids))
    anchored = head_mask(net, all_heads(net))
    ids: list[int] = []
    answers = []
    for turn in session.turns:
        ids += turn.prompt_ids
        answer: list[int] = []
        while len(answer) < 16:
            hidden = turn_hidden(net, cache, torch.tensor(ids), anchored)
            token = int(net.logits(hidden[-1]).argmax())
            ids.append(token)
            if token == DEFAULT_LANGUAGE.eot:
                break
            answer.append(token)
        answers.append(answer)
    return answers


def test_the_cost_of_a_context_tells_how_dense_it_is(net):
    """A filler word is one of four (1.39 nats), a code one of 64 (4.16); held-out contexts."""
    seeds = range(SEED, SEED + 1)
    sparse, dense = (nll_by_class(net, 4096, facts, seeds) for facts in (8, 256))
    assert sparse["filler"] <= 1.8
    assert dense["all"] >= sparse["all"] + 1.5


def test_transformers_computes_the_same_logits(net):
    transformers = pytest.importorskip("transformers")
    stock = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    session = make_session(np.random.default_rng(SEED), 600, 3)
    ids = torch.tensor([[*session.context_ids, *session.turns[0].prompt_ids]])
    with torch.no_grad():
        torch.testing.assert_close(net(ids), stock(ids).logits, atol=1e-4, rtol=1e-4)


def test_the_tokenizer_and_the_language_agree(tokenizer):
    session = make_session(np.random.default_rng(SEED), 400, 2)
    text = DEFAULT_LANGUAGE.decode(session.context_ids)
    assert tokenizer.encode(text) == session.context_ids.tolist()
    assert tokenizer.decode(session.context_ids) == text
    assert tokenizer.encode("xyzzy") == DEFAULT_LANGUAGE.encode("xyzzy")
    assert tokenizer.vocab_size == DEFAULT_LANGUAGE.vocab_size


@pytest.mark.parametrize("calls_tools", [False, True])
def test_the_chat_template_writes_what_the_language_writes(tokenizer, calls_tools):
    """A tool call is written as the answer that it was read from."""
    session = make_session(np.random.default_rng(SEED), 200, 2, 4, invented_share=0.0)
    first, second = session.turns
    text = DEFAULT_LANGUAGE.decode
    answer, asked = {"content": text(first.answer_ids)}, {"role": "user"}
    found = list(second.prompt_ids)
    if calls_tools:
        name, codes = (text(part) for part in np.split(first.answer_ids, [2]))
        call = {"name": "open_vault", "arguments": {"vault": name, "codes": codes}}
        answer, asked = {"tool_calls": [{"type": "function", "function": call}]}, {"role": "tool"}
        found[0] = DEFAULT_LANGUAGE.ids["<tool>"]
    messages = [
        {"role": "system", "content": text(session.context_ids[1:])},
        {"role": "user", "content": text(first.prompt_ids[1:-1])},
        {"role": "assistant", **answer},
        {**asked, "content": text(second.prompt_ids[1:-1])},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turns = [*first.prompt_ids, *first.answer_ids, DEFAULT_LANGUAGE.eot, *found]
    assert tokenizer.encode(rendered) == [*session.context_ids.tolist(), *turns]


def test_the_tokenizer_s_files_are_what_is_written_today(tmp_path):
    write_tokenizer(tmp_path)
    written = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert written == {name: json.loads((FOLDER / name).read_text()) for name in written}
    assert len(written) == 3


def test_the_special_ids_are_the_language_s(tokenizer):
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id == DEFAULT_LANGUAGE.eot
    assert config["bos_token_id"] == tokenizer.bos_token_id == DEFAULT_LANGUAGE.bos
    assert config["pad_token_id"] == tokenizer.pad_token_id == DEFAULT_LANGUAGE.pad
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert generation["eos_token_id"] == DEFAULT_LANGUAGE.eot
