"""The check that a server could have written a record of turns. A record from the tier may be
another version's, damaged before it was checksummed, or made up, and a restored context must be one
that this server compresses just so.

Checked is what a server's own rules decide. What they leave open is open here, too: where nodes
end, and within what a retention rule allows, how many entries were kept (ShareRule.bounds).

A node is compressed once, by the rule for what it is then, and may be cut afterwards:

    as compressed    [ sink |   dropped   | recent | generated ]
    cut before       [ si ][ nk | dropped | recent | generated ]       both parts as the rule says
    cut behind       [ sink |   dropped   | rec ][ ent | generated ]   the first part has fewer
                                                                       recent tokens than the rule
                                                                       leaves
    cut inside       [ sink | drop ][ ped | recent | generated ]       each part has what is kept of
                                                                       its tokens, few or many
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from kvtier.errors import TierProtocolError
from kvtier.retention.locality import DroppedSpan, LocalityRule
from kvtier.retention.shares import PAGE, AtMost, Everything, ShareRule, Turn, whole_pages
from kvtier.tier.blobs.turns import Place, TurnRecord, places


@dataclass(frozen=True)
class TurnRules:
    """The rules by which a server compresses. share: how much CA heads keep. page: entries of a
    page of it.

    They may be asked from any thread.
    """

    locality: LocalityRule
    share: ShareRule
    page: int = PAGE

    def check(self, record: TurnRecord, share: float | None = None) -> None:
        """Raises TierProtocolError naming the first node that these rules do not make. share: that
        the session's turns keep at most, see Scope. A server that keeps everything does so of all
        sessions."""
        if share is not None and not isinstance(self.share, Everything):
            return replace(self, share=AtMost(self.share, share)).check(record)
        begun = []
        held, torn = 0, False
        for place in places(record):
            begun.append(_Begun(place.start, held))
            tokens, end = place.node.stop - place.start, place.node.dropped[1]
            before, torn = torn, tokens == end
            problem = self._problem(place, begun, is_part=torn or before)
            if problem is not None:
                raise TierProtocolError(
                    f"a record of turns that this server does not make: tokens "
                    f"[{place.start}, {place.node.stop}) {problem}"
                )
            begin, end = place.node.dropped
            held += place.node.stop - place.start - (end - begin - place.node.kept)

    def _problem(self, place: Place, begun: list[_Begun], *, is_part: bool) -> str | None:
        """begun: where the nodes up to this one begin. is_part: its dropped span may be a part of
        one that was cut."""
        node, span = place.node, DroppedSpan(*place.node.dropped)
        if not (place.start or node.exact):
            return "are not exact though nothing is before them"
        if not node.compressed and span == DroppedSpan(0, 0):
            return None
        if not node.compressed:
            return "have something dropped though they are not compressed"
        if not self._drops(place, span):
            return f"have dropped {span.begin} to {span.end}"
        if is_part and 0 < node.kept == whole_pages(node.kept, span.num_tokens, self.page):
            return None
        if span.num_tokens and not self._keeps(place, span, begun):
            return f"have kept {node.kept} entries of {span.num_tokens}"
        return None

    def _drops(self, place: Place, span: DroppedSpan) -> bool:
        """Return whether the node's dropped span is the rule's, for the node as it is or before a
        cut; or nothing, where that would have saved nothing."""
        rule, start, node = self.locality, place.start, place.node
        if span == DroppedSpan(0, 0):
            return True
        if span.begin != max(rule.sink_tokens - start, 0) or span.num_tokens < 2:
            return False
        if span.end == node.stop - start:
            return True
        stops = self._prompt_stops(place, span)
        if min(node.prompt_stop, node.stop) in stops:
            return True
        behind = node.stop - start - span.end >= rule.branch_recent_tokens
        # Only of a prompt that was longer than the part the rule cannot tell any more.
        return behind and any(node.stop <= stop <= node.prompt_stop for stop in stops)

    def _prompt_stops(self, place: Place, span: DroppedSpan) -> list[int]:
        """Return the places where the node's prompt may have ended when its span was dropped. It
        was as long as it is, or longer, if the node was cut since."""
        rule, end = self.locality, span.end
        recent = range(rule.recent_tokens + 1)
        return [place.start + end + some for some in recent if rule.recent(end + some) <= some]

    def _keeps(self, place: Place, span: DroppedSpan, begun: list[_Begun]) -> bool:
        """Return whether CA heads may have kept so many of a dropped span."""
        kept = place.node.kept
        if kept != whole_pages(kept, span.num_tokens, self.page):
            return False
        # A node that begins inside the sink may have been cut from one that began before it.
        possible = begun if place.start <= self.locality.sink_tokens else begun[-1:]
        for begin, stop in product(possible, self._prompt_stops(place, span)):
            turn = Turn(stop - begin.start, span.num_tokens, begin.held)
            # The context before it may have been compressed later.
            least, most = self.share.bounds(turn, most_held=begin.start)
            if least <= kept <= whole_pages(most, span.num_tokens, self.page):
                return True
        return False


@dataclass(frozen=True)
class _Begun:
    """The beginning of a node. held: CA entries of what is before it."""

    start: int
    held: int
