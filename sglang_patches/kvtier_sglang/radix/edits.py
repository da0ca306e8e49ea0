"""The reuse of what stood behind a text that was edited: it goes on behind the new text.

    the tree has   [ system | clock 9:41 | turn 1 | turn 2 | turn 3 ]
    request        [ system | clock 9:57 | turn 1 | note   | turn 3 | turn 4 ]

    matched        [ system ]
    computed                [ clock 9:57 ]
    copied                               [ turn 1 ]                              keys turned
    computed                                      [ note ]
    copied                                               [ turn 3 ]
    computed                                                      [ turn 4 ]

The request's prefill stops where a run of tokens begins that the tree holds elsewhere (index.py).
The run's first tokens were computed closest to what is gone: as many of them are computed again as
are new before them, at most MOST_AGAIN. Entries that are kept of the run are copied behind what was
computed, with their keys rotated by as much as the run has moved, and the prefill goes on behind
them. The copies are `moved`: they have seen the text that is gone, so no request that wants exact
KV enters them. Where a run reaches the end of the old context, that is evicted before any other, so
that nobody else's makes room for the copy.

All of it runs in the scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from sglang.srt.mem_cache.radix_cache import RadixKey

from kvtier.retention.locality import LEAST_PART, MOST_AGAIN, DroppedSpan
from kvtier_sglang.pool.turning import KeyTurner
from kvtier_sglang.radix.index import Run, TokenIndex, path_key
from kvtier_sglang.radix.matching import cut_window
from kvtier_sglang.radix.node import KvNode, descendants
from kvtier_sglang.radix.request_states import RequestState
from kvtier_sglang.radix.tree import VariantRadixTree
from kvtier_sglang.radix.turn_end import evict_first
from kvtier_sglang.request_options import asks_to_forget

# KV that was turned so often is computed again, as every turn rounds. Codes may be turned less
# often, as every turn codes them anew.
MOST_TURNS, MOST_CODINGS = 40, 2


class Piece(NamedTuple):
    """The tokens of a node between two offsets, of which something may be copied."""

    node: KvNode
    begin: int
    stop: int

    @property
    def dropped(self) -> DroppedSpan:
        """The part of the node's dropped span that lies between the offsets."""
        return DroppedSpan(*(min(max(at, self.begin), self.stop) for at in self.node.dropped))

    def turns(self, shift: int, *, coded: bool) -> int:
        """Return how often the KV of a copy that stands `shift` tokens further on was turned, or
        coded again."""
        anew = coded and self.begin > self.node.dropped.begin and self.dropped.num_tokens > 0
        return self.node.turns + int(shift != 0 or anew)

    def may_be_copied(self, shift: int, *, coded: bool) -> bool:
        node, tokens = self.node, self.dropped.num_tokens
        is_short = 0 < tokens < min(LEAST_PART, node.dropped.num_tokens)
        most = MOST_CODINGS if coded and tokens else MOST_TURNS
        is_worn = self.turns(shift, coded=coded) > most
        return node.compressed and node.num_slots > 0 and not (is_short or is_worn)


class Edits:
    """The reuse of one tree's contexts behind edits, see the module docstring. least: the fewest
    tokens of a run that is worth it."""

    def __init__(self, tree: VariantRadixTree, turner: KeyTurner, least: int) -> None:
        self._tree, self._turner, self._least = tree, turner, least
        self._rule = tree.matching.rule
        packed = tree.allocator.pool.packed
        self._coded = packed is not None and packed.coded is not None
        tree.index = self._index = TokenIndex()

    def begin(
        self, req: Any, state: RequestState, key: RadixKey, node: KvNode, cached: int
    ) -> KvNode:
        """Look for what a request may go on with, and return the node that it begins behind. It
        matched `key` up to `node`, and the tree has `cached` tokens of it, usable or not. A request
        that asks to forget has the contexts with such runs dropped instead."""
        begin = max(node.stop, cached)
        if state.runs_seen != (self._index.version, begin):
            runs = list(self._runs(key, begin))
            if asks_to_forget(req):
                for run in runs:
                    self._drop(run.node, node)
                if self._tree.evicted is not None:
                    for run in self._evicted_runs(key, begin):
                        self._tree.evicted.remove(run.node)
                runs = []
            state.runs_ahead = [run.begin for run in runs]
            state.runs_seen = self._index.version, begin
        return self._go_on(state, key, node)

    def edited_from(self, key: RadixKey, begin: int) -> RadixKey | None:
        """Return the longest of the evicted contexts that have runs of key[begin:] behind an edit;
        None where the tree's own runs have as many tokens as theirs."""
        runs = self._evicted_runs(key, begin)
        held = sum(run.stop - run.begin for run in self._runs(key, begin))
        if sum(run.stop - run.begin for run in runs) <= held:
            return None
        return path_key(max((run.node for run in runs), key=lambda node: node.stop))

    def _evicted_runs(self, key: RadixKey, begin: int) -> list[Run]:
        """Return the runs of evicted contexts, but for those that the request itself begins
        with."""
        if self._tree.evicted is None:
            return []
        runs = self._tree.evicted.runs(key, begin, self._least)
        return [run for run in runs if run.shift or path_key(run.node).match(key) < run.stop]

    def go_on(self, state: RequestState, key: RadixKey, node: KvNode) -> KvNode:
        """Copy the run that begins at the end of `node`, up to which a request was computed, if
        there still is one. Return the node that the request goes on behind."""
        if node.stop not in state.runs_ahead:
            return node
        return self._go_on(state, key[: len(key) - 1], node)

    def _go_on(self, state: RequestState, key: RadixKey, node: KvNode) -> KvNode:
        while node.stop in state.runs_ahead:
            run = next(iter(self._runs(key, node.stop)), None)
            if run is None or run.begin != node.stop:
                break
            last = self._copy(node, key, run)
            if last is node:
                break
            node = last
        return node

    def _runs(self, key: RadixKey, begin: int) -> Iterator[Run]:
        seen = begin
        for run in self._index.runs(key, begin, self._least):
            new, seen = run.begin - seen, run.stop
            run = run._replace(begin=run.begin + min(new, MOST_AGAIN))
            pieces = _pieces(run)
            while pieces and not self._may_be_copied(pieces[0], run):
                pieces.pop(0)
            if not pieces:
                continue
            first = pieces[0]
            run = run._replace(begin=first.node.start + first.begin + run.shift)
            last = pieces[-1]
            if last.stop < len(last.node.key) and not self._rule.can_split(
                last.node.dropped, last.stop
            ):
                # The tokens that follow want the newest ones before them, as behind any other cut.
                run = run._replace(stop=run.stop - cut_window(last.node))
            copied = list(takewhile(partial(self._may_be_copied, run=run), _pieces(run)))
            if copied:
                run = run._replace(stop=copied[-1].node.start + copied[-1].stop + run.shift)
                if run.stop - run.begin >= self._least:
                    yield run

    def _may_be_copied(self, piece: Piece, run: Run) -> bool:
        # Entries that are kept for several tokens at once cannot be told apart.
        is_known = not piece.dropped.num_tokens or self._tree.matching.has_tokens(piece.node)
        return is_known and piece.may_be_copied(run.shift, coded=self._coded)

    def _copy(self, node: KvNode, key: RadixKey, run: Run) -> KvNode:
        """Hang copies of a run's tokens behind a node, and return the last of them; the node itself
        where nothing could be copied."""
        tree = self._tree
        locks, copy = [tree.lock(run.node), tree.lock(node)], None
        for piece in _pieces(run):
            part = key[node.stop : piece.node.start + piece.stop + run.shift]
            known = (one for one in node.children.values() if one.moved)
            copy = next((one for one in known if one.key.token_ids == part.token_ids), None)
            if copy is None:
                value = tree.copied(piece.node, piece.begin, piece.stop, self._turner, run.shift)
                if value is None:
                    break
                copy = self._hang(node, part, value, piece, run.shift)
            node = copy
            locks.append(tree.lock(node))
        for lock in reversed(locks):
            tree.unlock(lock)
        if copy is not None and run.stop - run.shift == run.node.stop:
            # Most likely nobody asks for it again.
            evict_first(run.node)
        return node

    def _drop(self, node: KvNode, matched: KvNode) -> None:
        """Take the path to a node out of the tree from where it leaves the one that was matched,
        with all that stands on it, but for what requests use."""
        stays = {one.id for one in matched.path()}
        left = [one for one in node.path() if one.id not in stays]
        top = left[-1] if left else matched
        if top is matched or (top.key.child_key(), top.id) not in top.parent.children:
            # An earlier run's path had it.
            return
        for one in [*list(descendants(top))[::-1], top]:
            if not one.lock_ref and not one.children:
                self._tree.remove_leaf(one)
                self._tree.counters["forgotten_tokens"] += len(one.key)

    def _hang(self, parent: KvNode, key: RadixKey, value: Any, piece: Piece, shift: int) -> KvNode:
        tree, source = self._tree, piece.node
        node = tree.hang(parent, key, value, source.priority, source.prompt_stop + shift)
        node.compressed, node.exact, node.moved = True, False, True
        node.turns = piece.turns(shift, coded=self._coded)
        node.session = source.session
        first, last = piece.dropped
        tree.shrink(node, len(key) - int((value > 0).sum()))
        if last > first:
            node.dropped = DroppedSpan(first - piece.begin, last - piece.begin)
            node.choice = source.choice
            node.sync_kept(tree.allocator.pool.held_entries)
        tree.remember(node)
        tree.counters["moved_tokens"] += len(key)
        return node


def _pieces(run: Run) -> list[Piece]:
    """Return the parts that the nodes of a run's path have of it, first to last."""
    begin, stop = run.begin - run.shift, run.stop - run.shift
    found = []
    for node in run.node.path():
        part = Piece(node, max(begin - node.start, 0), min(stop, node.stop) - node.start)
        if part.stop > part.begin:
            found.append(part)
    return found[::-1]
