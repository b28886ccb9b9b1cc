"""Layers for ``kernels.kernelize``, as Hugging Face's Kernel Hub wants them: no constructor, no state, ``forward``
alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

# the hub gives the package another name
from ..functional import linear_cross_entropy  # noqa: TID252


class LinearCrossEntropy(nn.Module):
    """Takes the place of a module whose ``forward(hidden, weight, targets)`` is a linear head's cross-entropy.

    That module's ``options``, a dict, where it has one, are those of :func:`cce_dist.linear_cross_entropy`.
    """

    can_torch_compile = True
    # of the module whose forward this becomes
    options: dict[str, Any]

    def forward(self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Any:
        """hidden ``[..., D]``, weight ``[V, D]``, targets ``[...]`` -> the loss, fp32."""
        return linear_cross_entropy(hidden, weight, targets, **getattr(self, "options", {}))
