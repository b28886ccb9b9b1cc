"""The loss of a sequence whose tokens are spread over Ulysses' ranks, and DeepSpeed's own signature of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from cce_dist.functional import linear_cross_entropy
from cce_dist.parallel.collectives import all_reduce, rank_and_size
from cce_dist.parallel.shard import VocabShard


class SequenceParallel:
    """How an engine combines the gradients of ``group``'s ranks, each of which has other tokens of a sequence.

    DeepSpeed adds them up at stages 0 to 2 and averages them at stage 3 (``averages``): there, and nowhere else, the
    gradient of a rank's own losses is scaled by the group's size.
    """

    def __init__(self, group: dist.ProcessGroup, averages: bool) -> None:
        self.group = group
        self.factor = group.size() if averages else 1

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        # a value; a process group has no copy
        return self

    def loss(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        *,
        reduction: str = "mean",
        denominator: float | torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """``hidden`` [..., D] and ``targets`` [...] of this rank -> the loss over all ranks' tokens, fp32, the same
        on each; for ``"none"`` this rank's, [...]. Two collectives of one number, one with a ``denominator``."""
        if reduction == "mean" and denominator is None:
            count = (targets != options.get("ignore_index", -100)).sum(dtype=torch.float64)
            all_reduce(count, self.group)  # collective
            denominator = count.clamp(min=1)
        own = linear_cross_entropy(hidden, weight, targets, reduction=reduction, denominator=denominator, **options)
        value = own.detach().clone()
        if reduction != "none":
            all_reduce(value, self.group)  # collective
        return _Combined.apply(own, value, self.factor)


class _Combined(torch.autograd.Function):
    """``value`` in forward, ``factor`` times the gradient of ``own`` in backward."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, value: torch.Tensor, factor: int) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad * ctx.factor, None, None


def vocab_parallel_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sp_group: dist.ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> torch.Tensor:
    """:func:`cce_dist.linear_cross_entropy` under the name and arguments of DeepSpeed's (``deepspeed.sequence``).

    Args:
        hidden: [..., D], equal on all ranks of ``tp_group``.
        weight, bias: [V, D] and [V], this rank's rows. Where its dtype is not hidden's, both are promoted.
        target: [...] int64, ids of the whole vocabulary.
        sp_group: ranks with other tokens: ``"mean"`` and ``"sum"`` are over all, the gradient is that of this rank's.
        vocab_start_index, vocab_end_index: the rows' bounds; both or none, which means equal shards.
        chunk_size: what DeepSpeed's takes; here the planner decides, and it must be positive only.

    Returns fp32: [], or [...] for ``"none"``. Raises ``ValueError`` for bounds that are not the weight's or not those
    of a partition, and what :func:`cce_dist.linear_cross_entropy` raises: of a target out of range ``IndexError`` on
    CPUs, while on GPUs, where DeepSpeed's waits for the device to tell, that token's loss is NaN.
    """
    if (vocab_start_index is None) != (vocab_end_index is None):
        raise ValueError(
            f"vocab_start_index and vocab_end_index go together, got {vocab_start_index} and {vocab_end_index}"
        )
    if chunk_size is not None and chunk_size <= 0:
        raise ValueError(f"chunk_size must be positive, got {chunk_size}")
    rank, size = rank_and_size(tp_group)
    start = rank * len(weight) if vocab_start_index is None else vocab_start_index
    stop = start + len(weight) if vocab_end_index is None else vocab_end_index
    shard = None
    if size > 1:
        assert tp_group is not None
        shard = _shard(tp_group, start, stop)
    elif (start, stop) != (0, len(weight)):
        raise ValueError(f"rows {start} to {stop} of a weight of {len(weight)} rows need the tp_group of the others")
    if not torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    options: dict[str, Any] = {"bias": bias, "ignore_index": ignore_index, "reduction": reduction, "shard": shard}
    if sp_group is None or sp_group.size() == 1:
        return linear_cross_entropy(hidden, weight, target, **options)
    return SequenceParallel(sp_group, averages=False).loss(hidden, weight, target, **options)


# kept for good: a shard remembers what the group's ranks have agreed on
@functools.cache
def _shard(group: dist.ProcessGroup, start: int, stop: int) -> VocabShard:
    bounds: list[Any] = [None] * group.size()
    dist.all_gather_object(bounds, (start, stop), group=group)  # collective
    # a gap or an overlap is found where the ranks compare their shards
    return VocabShard(start, stop, max(end for _, end in bounds), group)
