"""The attention that the next query will pay, predicted from the newest ones: KeepKV's predicted
scores (section 4.3).

The paper predicts scores s = e^a, not logits a (equations 12 and 13), so that one query's surprise
counts as much as it weighs. Over a window of the newest w queries its bias-corrected moving average

    ŝ_i = Σ_j ω_j s_ji      ω_j = (1 - α) α^(w-1-j) / (1 - α^w)      j = w - 1 is the newest

is a weighted mean. Everything stays in the log domain: what is returned is ln ŝ. (A mean of logits
would be one product with the mean query, and is worse: it forgets what only some queries look at.)

Scores compare within one query only, so a query that likes its keys well would outvote the others.
So each is divided by its sum over all keys, e^lse: a mean of attention, where all queries count
alike.

Layout: heads first, `[heads, tokens, dim]`. Stateless, and on CUDA nothing waits for the device.
"""

from __future__ import annotations

import torch

from kvtier_kernels.registry import selection_kernels


def window_weights(window: int, alpha: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """ω: float64 `[window]`, the newest query last; sums to 1.

    alpha: in [0, 1); 0 trusts the newest query alone.
    """
    age = torch.arange(window - 1, -1, -1, dtype=torch.float64, device=device)
    weights = torch.pow(alpha, age)
    return weights / weights.sum()


def predicted_logits(
    q_window: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    alpha: float,
    lse: torch.Tensor,
) -> torch.Tensor:
    """ln ŝ of every key for every query head; for one query, its logits less its lse.

    q_window: `[w, heads, group, dim]`, the newest query last; keys: `[heads, tokens, dim]`, both
              rotated, any float dtype
    scale:    multiplies q.k (usually 1 / sqrt(dim))
    lse:      `[w, heads, group]`, what each query's scores are divided by (see `window_lse`);
              zeros average them as the paper does
    Returns float32 `[heads, group, tokens]`, natural log.
    """
    log_weights = window_weights(len(q_window), alpha, keys.device).log().float()
    offset = log_weights - lse.float().permute(1, 2, 0)
    kernels = selection_kernels(keys.device)
    return kernels.predicted_logits(q_window, keys, scale, offset)


def window_lse(q_window: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Log-sum-exp of each query of the window over all keys.

    q_window: `[w, heads, group, dim]`; keys: `[heads, tokens, dim]`
    Returns float32 `[w, heads, group]`, natural log.
    """
    return selection_kernels(keys.device).window_lse(q_window, keys, scale)
