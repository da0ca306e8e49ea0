"""Metrics say what the figures say, whatever happens to the engine or the disk between."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tiered_tree_harness import REFRESH, turn, two_turns
from tree_harness import MiniScheduler, run_turn
from tree_requests import context
from waiting import SAFETY_S

from kvtier.retention.shares import FixedShare
from kvtier_sglang.status import publisher as publisher_module
from kvtier_sglang.status.figures import FIGURES, Kind, read_all
from kvtier_sglang.status.publisher import Publisher


@pytest.fixture
def publish(monkeypatch):
    """Publishers whose thread does nothing by itself: the test brings them up to date."""
    made: list[Publisher] = []
    monkeypatch.setattr(publisher_module, "EVERY_S", 1000.0)

    def make(cache) -> tuple[Publisher, CollectorRegistry]:
        registry = CollectorRegistry()
        made.append(Publisher(cache, "a-model", registry))
        return made[-1], registry

    yield make
    for one in made:
        one.stop.set()
        one.thread.join(SAFETY_S)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return the samples by name and the value of the label beside the model's."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "a-model"
            found[sample.name, "".join(labels.values())] = sample.value
    return found


def expected(cache) -> dict[tuple[str, str], float]:
    suffix = {f.name: "_total" if f.kind is Kind.COUNTER else "" for f in FIGURES}
    return {
        (name + suffix[name], label): value
        for name, values in read_all(cache).items()
        for label, value in values.items()
    }


def test_metrics_are_the_figures_turn_after_turn(publish, connect):
    s = MiniScheduler(share=FixedShare(0.5), link=connect(), refresh=REFRESH)
    publisher, registry = publish(s.tree)
    history = context(60)
    for number in range(3):
        turn(s, history, [number])
        history = [*history, number, *context(25, seed=number + 1)]
        assert s.tree.tier.link.flush(SAFETY_S)
        publisher.update()
        assert samples(registry) == expected(s.tree)
    assert samples(registry)["kvtier_refreshes_total", "refreshed_turns"] == 2


def test_what_was_restored_is_told_and_a_tier_that_is_given_up_on(publish, connect):
    tokens = two_turns(MiniScheduler(link=connect()))
    s = MiniScheduler(link=connect())
    publisher, registry = publish(s.tree)
    turn(s, [*tokens, 9, 9], [3])
    for _ in range(3):
        s.tree.tier.link.breaker.failed()
    publisher.update()
    found = samples(registry)
    assert found["kvtier_restored_tokens_total", ""] == len(tokens)
    assert found["kvtier_engine_tier_events_total", "restored_requests"] == 1
    token_bytes = s.tree.tier.token_bytes
    assert found["kvtier_engine_tier_bytes_total", "restored"] == len(tokens) * token_bytes
    assert found["kvtier_engine_tier_healthy", ""] == 0
    assert found["kvtier_engine_tier_events_total", "breaker_opened"] == 1
    assert found["kvtier_new_tokens_total", ""] == 2
    assert found["kvtier_hit_tokens_total", ""] == 0
    used = found["kvtier_pool_slots_used", ""]
    assert used * s.pool.slot_bytes == found["kvtier_pool_used_bytes", ""]


def test_every_figure_is_in_the_documentation():
    page = (Path(__file__).parents[3] / "docs" / "monitoring.md").read_text()
    suffix = {Kind.COUNTER: "_total"}
    told = [figure.name + suffix.get(figure.kind, "") for figure in FIGURES]
    assert [name for name in told if f"`{name}`" not in page] == []


def test_a_server_without_a_tier_has_no_figures_of_one(publish):
    s = MiniScheduler()
    publisher, registry = publish(s.tree)
    run_turn(s, context(60), [1])
    publisher.update()
    names = {name for name, _ in samples(registry)}
    assert "kvtier_pool_used_bytes" in names
    assert not any("tier_" in name.removeprefix("kvtier_") or "refresh" in name for name in names)


def test_metrics_that_fail_are_off_and_nothing_else_is(monkeypatch, caplog):
    failed = threading.Event()

    def fail(self: Publisher) -> None:
        failed.set()
        raise OSError("No space left on device")

    monkeypatch.setattr(Publisher, "update", fail)
    publisher = Publisher(MiniScheduler().tree, "a-model", CollectorRegistry())
    assert failed.wait(SAFETY_S)
    publisher.thread.join(SAFETY_S)
    assert not publisher.thread.is_alive()
    assert caplog.text.count("metrics failed and are off") == 1
