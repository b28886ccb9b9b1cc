"""The loss of a head, by a call of the head's own module."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from cce_dist.functional import TokenStats, linear_cross_entropy
from cce_dist.parallel.shard import VocabShard

from .adapters import operands
from .groups import check_groups, sequence_size, taken_by_zero
from .heads import find_head
from .sequence import SequenceParallel

# what is bound for all calls: the others are the layout's, or a call's
OPTIONS = frozenset(inspect.signature(linear_cross_entropy).parameters) - {
    "hidden", "weight", "targets", "bias", "shard", "reduction", "denominator", "token_weight", "return_stats",
}  # fmt: skip
MISSING: Any = object()


@dataclass
class HeadLoss:
    """How the loss of a head is computed: ``options`` of the loss; ``sequence`` where the tokens are spread over
    ranks; ``shard``, its rows, where its module does not say which; ``engine``, whether DeepSpeed trains it: of a
    parameter that ZeRO has taken this is known."""

    options: dict[str, Any] = field(default_factory=dict)
    sequence: SequenceParallel | None = None
    shard: VocabShard | None = None
    engine: bool = True

    # a compiled model's graph ends here: what follows replaces a forward, and is kernels and collectives anyway
    @torch.compiler.disable
    def __call__(
        self, head: Any, hidden: torch.Tensor, targets: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, TokenStats | None]:
        """The loss of ``hidden`` [..., D] and ``targets`` [...], by a call of the head's module."""
        results: list[Any] = []

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            results.extend(self._compute(head, hidden, targets, {**self.options, **options}))
            return results[0]

        before = head.__dict__.get("forward", MISSING)
        head.forward = forward
        try:
            loss = head(hidden)
        finally:
            put_back(head, "forward", before)
        if loss.data_ptr() != results[0].data_ptr():
            raise RuntimeError(
                f"head: a forward hook of {type(head).__name__} changes what it returns: its loss would be another"
            )
        return loss, results[1]

    def _compute(self, head: Any, hidden: torch.Tensor, targets: torch.Tensor, options: dict[str, Any]) -> Any:
        found = find_head(head, head, self.shard)
        engine = self.engine or taken_by_zero(found.module)
        if engine:
            check_groups(found)
        if engine and self.sequence is None and sequence_size() > 1:
            raise ValueError(
                "how gradients are combined under sequence parallelism depends on the engine: call "
                "prepare(engine) after deepspeed.initialize"
            )
        hidden, weight, bias = operands(head, hidden)
        # a head on a device of its own
        hidden, targets = hidden.to(weight.device), targets.to(weight.device)
        options = {**options, "bias": bias, "shard": found.shard}
        if self.sequence is not None:
            return self.sequence.loss(hidden, weight, targets, **options), None
        result: Any = linear_cross_entropy(hidden, weight, targets, **options)
        return result if options.get("return_stats") else (result, None)


def head_loss(
    head: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    reduction: str = "mean",
    denominator: float | torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The loss of a head, in the forward of a model that DeepSpeed trains. It calls the head's module, so that
    ZeRO-3's hooks gather its weight for forward and for backward.

    Args:
        head: as in :func:`prepare`; this rank's rows are known from the module.
        hidden: [..., D]. Equal on all tensor-parallel ranks, this rank's slice under Ulysses.
        targets: [...] int64, those of ``hidden``.
        reduction, denominator, options: see :func:`cce_dist.linear_cross_entropy`. Under Ulysses, after ``prepare``
            of the engine, ``"mean"`` and ``"sum"`` are over the whole sequence.

    Returns fp32, [] or [...]; raises what :func:`prepare` and :func:`cce_dist.linear_cross_entropy` raise.
    """
    loss: HeadLoss = head.__dict__.get("cce_loss") or HeadLoss()
    return loss(head, hidden, targets, reduction=reduction, denominator=denominator, **options)[0]


def put_back(module: nn.Module, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(module, name)
    else:
        setattr(module, name, value)
