"""The gradients of what forward saved: methods ``recompute`` and ``cached``, and a second backward of any."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..kernels.config import TILE_V
from ..kernels.gradient import RowState, column_sums, panel_gradient
from ..kernels.product import hidden_gradient, weight_gradient
from ..kernels.rows import scale_rows
from ..kernels.runtime import SecondStream, cdiv, round_up
from ..kernels.statistics import RowStatistics
from ..kernels.target import ClassSums, class_sums, target_rows
from ..objective import Coefficients
from ..planner import Plan
from .gradients import Gradients, fp16_exponent
from .operands import LossInputs, Operands
from .steps import NOTHING_KEPT, Kept, add_bias_gradient, softmax_scale, weighted_sum


def save_for_second_pass(
    ctx: Any,
    inputs: LossInputs,
    these: Operands,
    rows: RowStatistics,
    kept: Kept,
    reference: torch.Tensor | None,
    token_weight: torch.Tensor | None = None,
) -> None:
    """For :func:`second_pass`. The targets are saved as their places."""
    entropy = rows.entropy if these.options.entropy else None
    ctx.save_for_backward(
        *inputs[:4], inputs.class_weight, these.whole, these.ids, these.order, these.count, rows.row_max,
        rows.log_sum, rows.loss, entropy, rows.logit, kept.gradient, kept.own, reference, token_weight,
    )  # fmt: skip
    ctx.options = these.options
    # of several backwards one finds what is kept in the gradient's memory, which then is the gradient
    ctx.spent = False


def second_pass(
    ctx: Any,
    saved: tuple[Any, ...],
    grad_losses: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """The second pass: the gradients of hidden, weight, bias and scale from what forward saved."""
    (
        hidden, weight, bias, logit_scale, class_weight, whole, ids, order, count, row_max, log_sum, loss, entropy,
        logit, gradient, own, reference, _,
    ) = saved  # fmt: skip
    if weight.dim() != 2:
        raise RuntimeError(
            f"weight has the shape {tuple(weight.shape)} in backward: what gathered it for the loss, ZeRO-3 say, "
            "has let go of it. Call the loss inside the forward of the module that owns the weight"
        )
    inputs = LossInputs(hidden, weight, bias, logit_scale, order, class_weight)
    these = Operands.start(inputs, ctx.options, places=(ids, order, count), whole=whole)  # collective
    rows = RowStatistics(row_max, log_sum, loss, entropy, logit=logit)
    kept = NOTHING_KEPT if ctx.spent else Kept.of(these, gradient, own)
    if grad_losses is None:
        grad_losses = torch.zeros(len(order), dtype=these.wide, device=weight.device)
    grad_entropy = None if entropy is None or grad_entropy is None else these.packed(grad_entropy)
    coefficients = these.objective.coefficients(rows, ids, these.packed(grad_losses), these.logits, grad_entropy)
    coefficients, factor = _normalise(coefficients, weight.dtype)
    scale = factor if logit_scale is None else factor * logit_scale
    dtype, wide = weight.dtype, these.wide
    # the target's entry in a panel has all of it
    entry = coefficients.entry
    if coefficients.uniform is not None:
        spread = coefficients.uniform * these.objective.weights(ids)
        entry = (entry + (spread if coefficients.target_slope is None else spread * coefficients.target_slope)).to(
            wide
        )
    residual = entry - entry.to(dtype)
    if kept.columns:
        # the kept columns have none of it
        local = ids - these.shard.start
        apart = (local >= 0) & (local < kept.columns)
        entry, residual = torch.where(apart, 0, entry), torch.where(apart, coefficients.entry, residual)
    state = RowState(
        ids, row_max, log_sum, coefficients.factor, entry, residual if kept.columns or dtype != wide else None,
        coefficients.log_factor, coefficients.uniform, these.class_weight,
    )  # fmt: skip
    gradients = Gradients(these, weight, ctx.needs_input_grad[:4], kept.gradient)
    gradients.add_total(coefficients)
    ctx.spent = ctx.spent or (kept.gradient is not None and gradients.weight is not None)
    kept_factor = None
    if kept.columns:
        kept_factor = torch.where(state.factor == 0, 0, state.factor * softmax_scale(reference, rows))
    _walk_panels(these, state, scale, gradients, kept, kept_factor)
    return gradients.finish(factor)


def _normalise(coefficients: Coefficients, dtype: torch.dtype) -> tuple[Coefficients, torch.Tensor]:
    """(coefficients / factor, factor), for fp16 with factor a power of two that puts the largest entry that they can
    give between 2**12 and 2**14, for other dtypes 1.

    An fp16 panel then neither overflows nor loses small entries, whatever the loss scale. The products carry
    ``factor`` in their epilogues.
    """
    parts = [coefficients.factor, coefficients.entry, coefficients.log_factor, coefficients.uniform]
    one = coefficients.factor.new_ones(())
    if dtype != torch.float16 or not len(coefficients.factor):
        return coefficients, one
    # a NaN or inf is its own token's
    sizes = torch.stack([torch.where(part.isfinite(), part.abs(), 0) for part in parts if part is not None]).sum(0)
    exponent = fp16_exponent(sizes)
    names, parts = ("factor", "entry", "log_factor", "uniform", "total"), [*parts, coefficients.total]
    scaled: dict[str, Any] = {
        name: None if part is None else torch.ldexp(part, -exponent) for name, part in zip(names, parts, strict=True)
    }
    return replace(coefficients, **scaled), torch.ldexp(one, exponent)


def _walk_panels(
    these: Operands,
    state: RowState,
    scale: torch.Tensor,
    gradients: Gradients,
    kept: Kept,
    factor: torch.Tensor | None,
) -> None:
    """Fills the gradients a panel of columns at a time, and starts the reduction of that of the hidden states."""
    d_hidden, d_weight, d_bias = gradients.hidden, gradients.weight, gradients.bias
    e, c, count, col0 = these.e, these.c, these.count, these.shard.start
    plan, group, grow = these.options.plan, these.shard.group, these.options.main_grad is not None
    num_v, start, second, reducing = len(c), kept.columns, SecondStream(c.device), False
    # of the kept columns' products the classifier's tiles fill the last round of the other's. not where what is known
    # of the hidden states is needed next: a collective would queue behind them
    apart = 0 < start < num_v or (group is None and gradients.scale is None and these.options.slices is None)
    # whether a reduction that is started goes on under what follows
    shared = d_hidden is not None and group is not None
    everything, later = slice(0, len(e)), None
    # what is reduced at once; the same on every rank, also on one without a class or a token
    pieces = [everything] if these.options.slices is not None else list(these.chunks(plan.rows))

    def reduce(pieces: list[slice]) -> None:
        if d_hidden is not None:
            for piece in pieces:
                gradients.add_scale(piece)
                d_hidden.reduce(piece)  # collective

    if d_hidden is not None:
        uniform = None
        if start and state.uniform is not None and state.class_weight is not None:
            uniform = state.uniform, weighted_sum(c[:start], state.class_weight[:start])
        with second.beside() if apart else nullcontext():
            for columns, exponentials in kept.panels():
                hidden_gradient(exponentials, c, count, d_hidden.packed, v0=columns.start, add=columns.start > 0)
            target_rows(c, state.targets, state.residual, d_hidden.packed, col0=col0, scale=factor, uniform=uniform)
    if start and start == num_v:
        # under the classifier's product
        reduce(pieces)
        pieces, reducing = [], shared

    def sum_classes(
        columns: slice, out: torch.Tensor | None = None, scale: torch.Tensor | None = None
    ) -> ClassSums | None:
        if d_weight is None:
            return None
        return class_sums(
            e, state.targets, state.residual, count, columns.stop - columns.start, col0=col0 + columns.start,
            out=out, scale=scale, add=grow,
        )  # fmt: skip

    def add_weight(panel: torch.Tensor, rows: slice, columns: slice, sums: ClassSums | None, **carry: Any) -> None:
        if d_weight is not None:
            weight_gradient(
                panel, e[rows], count, scale, d_weight[columns], sums=sums, row0=rows.start,
                grow=grow, beside_collective=reducing, **carry,
            )  # fmt: skip

    if grow and d_weight is not None:
        sum_classes(slice(0, num_v), d_weight, scale)
    if factor is not None and len(e):
        _add_kept(these, state, scale, gradients, kept, factor, second, reducing)
    if start < num_v:
        # panels may take memory that was lent
        second.join()
    buffer = low = panel = sums = None
    for part, width, memory in _parts(e, None if grow else d_weight, slice(start, num_v), plan):
        blocks = list(these.chunks(plan.rows)) if memory is None else [everything]
        buffer = memory
        if buffer is None:
            buffer = e.new_empty(blocks[0].stop, min(width, round_up(part.stop - part.start, TILE_V)))
        if len(blocks) > 1 and d_weight is not None and d_weight.dtype == torch.bfloat16:
            low = torch.empty(buffer.shape[1], e.shape[1], dtype=torch.int16, device=e.device)
        if d_weight is not None and not grow:
            # the sums start the gradient in its own memory. of several blocks of tokens the last one's product scales
            # all that waits there, these too
            sums = sum_classes(part, d_weight[part], scale if len(blocks) == 1 else None)
        # what is left over comes first: the last product, under which dE is reduced, is a long one
        first = min(width, round_up((part.stop - part.start - 1) % width + 1, TILE_V))
        for v0, v1 in itertools.pairwise([part.start, *range(part.start + first, part.stop, width), part.stop]):
            columns = slice(v0, v1)
            for rows in blocks:
                panel = buffer[: rows.stop - rows.start, : columns.stop - v0]
                panel_gradient(
                    e, c, these.logits, state, count, panel,
                    row0=rows.start, v0=v0, col0=col0, bias_grad=None if d_bias is None else d_bias[columns],
                )  # fmt: skip
                last = rows.stop == len(e)
                if d_hidden is not None:
                    with second.beside():
                        hidden_gradient(panel, c, count, d_hidden.packed[rows], v0=v0, row0=rows.start, add=True)
                later = functools.partial(
                    add_weight, panel, rows, columns,
                    None if sums is None or rows.start else sums[v0 - part.start : columns.stop - part.start],
                    low=None if low is None else low[: columns.stop - v0],
                    add=rows.start > 0 and not grow, last=last or grow,
                )  # fmt: skip
                if not last or columns.stop < num_v:
                    if columns.stop == num_v and pieces and rows == pieces[0]:
                        # no panel adds to these tokens again
                        second.join()
                        reduce([pieces.pop(0)])
                        reducing = shared
                    later()
                    later = None
                    # before the next panel takes this one's memory
                    second.join()
    second.join()
    # under the product that is left
    reduce(pieces)
    reducing = shared
    if later is not None:
        later()


def _add_kept(
    these: Operands,
    state: RowState,
    scale: torch.Tensor,
    gradients: Gradients,
    kept: Kept,
    factor: torch.Tensor,
    second: SecondStream,
    reducing: bool,
) -> None:
    """Adds what the kept columns say to the gradients of weight and bias.

    In parts of the hidden width: what is scaled, and the targets' sums, which need full precision here, stay small.
    """
    e, count, col0, plan, start = these.e, these.count, these.shard.start, these.options.plan, kept.columns
    d_weight, d_bias, grow = gradients.weight, gradients.bias, these.options.main_grad is not None
    if d_bias is not None and start:
        for columns, panel in kept.panels():
            column_sums(panel, factor, count, d_bias[columns])
        assert state.residual is not None
        add_bias_gradient(d_bias[:start], these, state.residual, state.uniform)
    if d_weight is None:
        return
    spread = None
    if state.uniform is not None and state.class_weight is not None:
        spread = weighted_sum(e, state.uniform)
    parts = [slice(d, min(d + plan.part, e.shape[1])) for d in range(0, e.shape[1], plan.part)]
    scaled: torch.Tensor | None = None
    for columns, panel in kept.batches():
        if columns.start:
            # its rows of the gradient may hold exponentials that the other product reads
            second.join()
        for part in parts:
            if scaled is None or len(parts) > 1:
                # its memory first
                scaled = None
                scaled = torch.empty_like(e[:, part], memory_format=torch.contiguous_format)
                scale_rows(e[:, part], factor, count, scaled)
            sums = None
            if not grow:
                sums = class_sums(
                    e[:, part], state.targets, state.residual, count, columns.stop - columns.start,
                    col0=col0 + columns.start,
                )  # fmt: skip
            uniform = None
            if spread is not None and state.class_weight is not None:
                uniform = state.class_weight[columns], spread[part]
            weight_gradient(
                panel, scaled, count, scale, d_weight[columns, part], sums=sums, uniform=uniform, grow=grow,
                beside_collective=reducing, beside_product=second.busy,
            )  # fmt: skip


def _parts(
    e: torch.Tensor, d_weight: torch.Tensor | None, columns: slice, plan: Plan
) -> Iterator[tuple[slice, int, torch.Tensor | None]]:
    """(columns, width of their panels, memory for a panel or None) of the parts that panels walk over.

    ``plan.wide`` panels take memory of the classifier's gradient that is not written yet, that of the last columns.
    These then have panels half as wide, and so on down to ``plan.panel``, which have memory of their own.
    """
    n, d = e.shape
    start, stop = (columns.start, columns.stop) if n else (0, 0)
    width = plan.wide if d_weight is not None and d_weight.dtype == e.dtype else 0
    while width > plan.panel and start < stop:
        rows = cdiv(n * width, max(1, d))
        split = (stop - rows) // TILE_V * TILE_V
        if split > start:
            assert d_weight is not None
            yield slice(start, split), width, d_weight.view(-1)[split * d : split * d + n * width].view(n, width)
            start = split
        width = width // (2 * TILE_V) * TILE_V
    if start < stop:
        yield slice(start, stop), plan.panel, None
