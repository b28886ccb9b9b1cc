"""The loss in plain PyTorch, logits held whole: the truth that tests, docs and benchmarks measure against."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias``, computed in ``dtype`` on whole logits.

    Takes the arguments of :func:`cce_dist.linear_cross_entropy` that have a meaning on one device. ``dtype`` is
    ``torch.float64`` for the truth, ``torch.float32`` for the materialised path that people run.
    """
    logits = hidden.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    flat, labels = logits.flatten(0, -2), targets.flatten()
    # an ignored row takes no part, whatever its hidden state holds
    flat = torch.where((labels != ignore_index)[:, None], flat, 0.0)
    losses = F.cross_entropy(flat, labels, ignore_index=ignore_index, reduction="none")
    if reduction == "none":
        return losses.view(targets.shape)
    if reduction == "sum":
        return losses.sum()
    count = (labels != ignore_index).sum().clamp(min=1) if denominator is None else denominator
    return losses.sum() / count
