"""The loss as the ``loss_fn`` of DeepSpeed's ``PipelineModule``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from cce_dist.functional import linear_cross_entropy
from cce_dist.module import VocabParallelLMHead

Outputs = tuple[torch.Tensor, ...]


def with_weight(module: nn.Module, hidden: torch.Tensor) -> Outputs:
    """hidden [..., D] -> what :func:`pipeline_loss` takes. A last layer's ``forward_fn``, as of ``TiedLayerSpec``,
    whose module is the embedding that the first layer is, or a head."""
    bias = getattr(module, "bias", None)
    any_module: Any = module
    return (hidden, any_module.weight) if bias is None else (hidden, any_module.weight, bias)


class PipelineHead(VocabParallelLMHead):
    """A pipeline's last layer, untied: hidden [..., D] -> what :func:`pipeline_loss` takes. Its arguments are
    :class:`cce_dist.VocabParallelLMHead`'s."""

    def forward(self, hidden: torch.Tensor) -> Outputs:  # type: ignore[override]
        return with_weight(self, hidden)


class PipelineLoss:
    """``loss_fn`` of a ``PipelineModule`` whose last layer gives ``(hidden, weight)`` or ``(hidden, weight, bias)``,
    as :func:`with_weight` and :class:`PipelineHead` do: the mean over a micro-batch's tokens, [] fp32.

    Args:
        options: of :func:`cce_dist.linear_cross_entropy`; ``shard`` where a tensor-parallel group has the rows.

    The engine averages over micro-batches and data-parallel ranks. Where their counts of tokens differ, pass the
    labels as ``(targets, denominator)``: with the step's count over the number of micro-batches times that of ranks
    the sum over all tokens is divided by their count.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, outputs: Outputs, labels: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if not isinstance(outputs, (tuple, list)) or not 2 <= len(outputs) <= 3:
            raise TypeError(
                "outputs: expected (hidden, weight) or (hidden, weight, bias) of the last layer, a PipelineHead or a "
                f"TiedLayerSpec with forward_fn=with_weight, got {type(outputs).__name__}"
            )
        hidden, weight = outputs[:2]
        bias = outputs[2] if len(outputs) == 3 else None
        targets, denominator = labels if isinstance(labels, (tuple, list)) else (labels, None)
        return linear_cross_entropy(hidden, weight, targets, bias=bias, denominator=denominator, **self.options)
