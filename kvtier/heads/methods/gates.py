"""Gates: learn how much of the context every KV head needs (DuoAttention, arXiv 2410.10819).

A gate per KV head, between the whole context and kvtier's own locality rule, is trained to leave
the answers' distribution as the full model has it while the gates' sum falls:

    loss = KL(full ‖ gated) over the answers' tokens + price × mean gate

Learned gates say which heads can be dropped. Which of the best are needed most is told better by
the loss's gradient at one random draw of all gates (`kvtier.heads.methods.taylor`), where fewer
heads stand in for one another; so the best third goes by that.

DuoAttention's local branch is sink and recent tokens alone, its loss the distance of the last
hidden states; here what is optimised is what is served, the compensation entry included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtier.errors import UsageError
from kvtier.heads.methods.base import HeadMethod, HeadScores
from kvtier.heads.methods.ranking import best_heads
from kvtier.heads.methods.taylor import Taylor
from kvtier.heads.profile import Matrix, ModelShape
from kvtier.heads.progress import Progress, no_progress

if TYPE_CHECKING:
    from kvtier.heads.probes.context import ProbeBatch

# At 1 all heads stand in for one another, and no gate moves.
START = 0.9
# Of all heads, those that go by their gradient.
LAST_SHARE = 1 / 3


class Gates(HeadMethod):
    """Heads by their learned gates, the best third of them in `Taylor`'s order.

    seed:       of the random draw
    steps:      of Adam, one context each, in turn
    step_size:  of Adam
    price:      nats per answer token that all gates together cost
    """

    name = "gates"
    takes_seed = True

    def __init__(
        self, steps: int = 20, step_size: float = 0.1, price: float = 0.2, seed: int = 0
    ) -> None:
        if steps < 1:
            raise UsageError("steps", "at least 1", steps)
        for name, value in (("step_size", step_size), ("price", price)):
            if value <= 0:
                raise UsageError(name, "a number above 0", value)
        self.steps = steps
        self.step_size = step_size
        self.price = price
        self._last = Taylor(seed)

    def score(self, batches: Sequence[ProbeBatch], progress: Progress = no_progress) -> HeadScores:
        """The gates after the last step, in [0, 1]; equal ones by how strongly they are held. The
        order is theirs but for the best third."""
        import torch

        from kvtier.heads.probes.gates import answer_logits, gate_gradient

        shape, device = batches[0].shape, batches[0].ids.device
        ones = torch.ones(shape.num_layers, shape.num_kv_heads, device=device)
        teachers = []
        for done, batch in enumerate(batches):
            progress("answers of the full model", done, len(batches))
            with torch.no_grad():
                logits, _ = answer_logits(batch, ones)
            teachers.append(torch.log_softmax(logits, dim=-1))
        gates = (START * ones).requires_grad_()
        optimizer = torch.optim.Adam([gates], lr=self.step_size)
        held = torch.zeros_like(ones)
        for step in range(self.steps):
            progress("learning the gates", step, self.steps)
            which = step % len(batches)
            _, gradient = gate_gradient(batches[which], gates, teachers[which])
            gates.grad = gradient + self.price / gates.numel()
            held -= gradient / self.steps
            optimizer.step()
            with torch.no_grad():
                gates.clamp_(0, 1)
        progress("learning the gates", self.steps, self.steps)
        # Many end at 0 or 1 exactly: the mean gradient on the way orders those.
        learned = gates.detach() + 1e-3 * torch.tanh(held)
        scores: Matrix = tuple(tuple(map(float, row)) for row in learned)
        order = best_heads(scores, ones.numel())
        last = max(1, round(LAST_SHARE * len(order)))
        worth = self._last.score(batches, progress).mean
        best = sorted(order[:last], key=lambda at: -worth[at[0]][at[1]])
        return HeadScores(scores, order=(*best, *order[last:]))

    def found_by(self, scores: HeadScores, shape: ModelShape) -> dict[str, Any]:
        return {"steps": self.steps, "step_size": self.step_size, "price": self.price}
