"""The sum of the tokens' losses: method ``fused``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.gradient import column_sums
from ..kernels.product import hidden_gradient, weight_gradient
from ..kernels.rows import scale_rows
from ..kernels.runtime import SecondStream
from ..kernels.statistics import RowStatistics, sum_bits
from ..kernels.target import ClassSums, class_sums, target_rows
from ..parallel.merge import merge_statistics
from .gradients import Gradients, undifferentiable
from .operands import LossInputs, Operands, TokenValues
from .second_pass import save_for_second_pass, second_pass
from .steps import (
    NOTHING_KEPT,
    add_bias_gradient,
    chunk_statistics,
    panel_memory,
    references,
    softmax_scale,
    weighted_sum,
)


class TotalLoss(torch.autograd.Function):
    """The sum of the tokens' losses, by the method ``fused``: both gradients are made in forward, for an upstream
    gradient of 1, a chunk of tokens at a time in three products.

    :class:`LossInputs`, the tokens' weights [N] or None, and :class:`LossOptions` -> the total [] fp64, and
    :class:`TokenValues`, which are not differentiable.

    Forward: ``P = exp(x - r)`` of a chunk, ``r`` a reference of each row, its targets' entries zero. In the plain
    case, with ``q = exp(r - lse)``: ``dE = q (P C) + (p_t - 1) C_t``, and ``dC`` the sum over chunks of ``P^T (q E)``
    and over the tokens of a class of ``(p_t - 1) E``. Backward multiplies by the upstream gradient ``g``: in the last
    chunk's product for dC and in the last rounding of dE. A second backward computes as ``recompute``. Collectives:
    one of the references, two or three small ones a chunk in ``merge_statistics``, one a chunk of its dE, one of ds.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
        inputs, token_weight, options = LossInputs(*arguments[:-2]), arguments[-2], arguments[-1]
        these = Operands.start(inputs, options, keep=not ctx.needs_input_grad[0])  # collective
        pending = _Pending(these, inputs.weight, ctx.needs_input_grad[:4], token_weight)
        reference = references(these)
        logit = torch.zeros(these.num_rows, dtype=these.wide, device=these.c.device)
        bits, parts, second = sum_bits(options.shard.vocab_size), [], SecondStream(these.c.device)
        for chunk in these.chunks(options.plan.chunk):
            panel = pending.panel(chunk)
            statistics = chunk_statistics(these, chunk, logit, [panel], reference)
            # the row's normaliser is not needed: it is found beside the product's last tiles
            with second.beside():
                pending.add_hidden(chunk, panel)
            parts.append(merge_statistics(statistics, bits, options.shard.group))  # collectives
            second.join()
            pending.normalise(chunk, panel, reference, parts[-1])
        rows = RowStatistics.cat(parts) if parts else these.no_rows()
        loss = these.objective.loss(rows, these.ids)
        save_for_second_pass(ctx, inputs, these, rows, NOTHING_KEPT, None, token_weight)
        ctx.pending = pending
        values = TokenValues.of(rows, loss, these)
        ctx.mark_non_differentiable(*(x for x in values if x is not None))
        losses = values.loss if token_weight is None else values.loss * token_weight
        return losses.sum(dtype=torch.float64), *values

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            # raises where an input has been written to since. asked for once, as activation checkpointing allows
            saved = ctx.saved_tensors
            order, token_weight = saved[7], saved[-1]
            pending, ctx.pending = ctx.pending, None
            if pending:
                gradients = pending.finish(grad)
            else:
                grads = grad.expand(len(order))
                grads = grads if token_weight is None else grads * token_weight
                gradients = second_pass(ctx, saved, grads, None)
        return undifferentiable("linear_cross_entropy", *gradients, None, None, None, None)


class _Pending:
    """Gradients on their way from forward to backward, for an upstream gradient of 1."""

    def __init__(
        self, these: Operands, weight: torch.Tensor, needs: Sequence[bool], token_weight: torch.Tensor | None
    ) -> None:
        wide, chunk = these.wide, these.options.plan.chunk
        self.these = these
        self.one = torch.ones((), dtype=wide, device=weight.device)
        if token_weight is None:
            token_weight = self.one.expand(len(these.order))
        self.token_weight = these.packed(token_weight)
        self.gradients = Gradients(these, weight, needs)
        d_weight, self.low = self.gradients.weight, None
        if d_weight is not None and these.num_rows > chunk and d_weight.dtype != wide:
            self.low = torch.empty(these.c.shape, dtype=torch.int16, device=weight.device)
        self.buffer: torch.Tensor | None = panel_memory(these.c, min(chunk, these.num_rows), len(these.c))
        # the sums over classes and over tokens that smoothing adds, each with its factor of the other side
        self.over_classes = self.over_tokens = self.uniform = None
        if these.class_weight is not None:
            self.over_classes = weighted_sum(these.c, these.class_weight)
            self.uniform = these.objective.uniform(self.token_weight)
            self.over_tokens = these.class_weight, weighted_sum(these.e, self.uniform)
        # the targets' entries of the chunks so far, for the bias
        self.entries: list[torch.Tensor] = []
        # what the last chunk's product for the classifier needs
        self.last: tuple[slice, torch.Tensor, ClassSums | None] | None = None

    def panel(self, rows: slice) -> torch.Tensor:
        assert self.buffer is not None
        return self.buffer[: rows.stop - rows.start]

    def add_hidden(self, chunk: slice, panel: torch.Tensor) -> None:
        if self.gradients.hidden is not None:
            packed = self.gradients.hidden.packed[chunk]
            hidden_gradient(panel, self.these.c, self.these.count, packed, v0=0, row0=chunk.start, add=False)

    def normalise(self, chunk: slice, panel: torch.Tensor, reference: torch.Tensor, rows: RowStatistics) -> None:
        these, gradients = self.these, self.gradients
        e, ids, count, col0 = these.e[chunk], these.ids[chunk], these.count, these.shard.start
        state = these.objective.coefficients(rows, ids, self.token_weight[chunk], these.logits)
        factor = torch.where(state.factor == 0, 0, state.factor * softmax_scale(reference[chunk], rows))
        gradients.add_total(state)
        if gradients.hidden is not None:
            uniform = None
            if self.over_classes is not None and state.uniform is not None:
                uniform = state.uniform, self.over_classes
            packed = gradients.hidden.packed[chunk]
            target_rows(these.c, ids, state.entry, packed, col0=col0, scale=factor, uniform=uniform)
            gradients.add_scale(chunk)
            if these.options.slices is None:
                # under the products that follow
                gradients.hidden.reduce(chunk)  # collective
        if gradients.bias is not None:
            d_bias = gradients.bias[: len(these.c)]
            column_sums(panel, factor, count, d_bias, row0=chunk.start)
            self.entries.append(state.entry)
            if chunk.stop == these.num_rows:
                add_bias_gradient(d_bias, these, torch.cat(self.entries), self.uniform)
        if gradients.weight is not None:
            sums = class_sums(e, ids, state.entry, count, len(these.c), col0=col0, row0=chunk.start)
            scale_rows(e, factor, count, e, row0=chunk.start)
            if chunk.stop == these.num_rows:
                self.last = chunk, panel, sums
            else:
                self.add_weight(chunk, panel, sums, self.one, last=False)
        elif chunk.stop == these.num_rows:
            self.buffer = None

    def add_weight(
        self, chunk: slice, panel: torch.Tensor, sums: ClassSums | None, scale: torch.Tensor, *, last: bool
    ) -> None:
        these, d_weight = self.these, self.gradients.weight
        assert d_weight is not None
        weight_gradient(
            panel, these.e[chunk], these.count, scale, d_weight[: len(these.c)], row0=chunk.start, sums=sums,
            uniform=self.over_tokens if last else None, low=self.low, add=chunk.start > 0, last=last,
            beside_collective=these.shard.group is not None,
        )  # fmt: skip

    def finish(self, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of hidden, weight, bias and scale for the upstream gradient ``grad`` []."""
        these, hidden = self.these, self.gradients.hidden
        factor = grad.to(these.wide)
        if hidden is not None and these.options.slices is not None:
            # under the product that is left
            hidden.reduce(slice(0, these.num_rows))  # collective
        if self.last is not None:
            scaled = factor if these.logits.scale is None else factor * these.logits.scale
            self.add_weight(*self.last, scaled, last=True)
        # before the results take their place
        self.last = self.buffer = self.low = None
        return self.gradients.finish(factor)
