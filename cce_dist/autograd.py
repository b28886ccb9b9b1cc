"""The operation: kernels and collectives in their order. The only file that knows both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .kernels.config import TILE_V, tiles_for
from .kernels.gradient import RowState, panel_gradient
from .kernels.product import hidden_gradient, weight_gradient
from .kernels.rows import pack_order, pack_rows, unpack_rows
from .kernels.runtime import multiprocessors, round_up, target_of
from .kernels.statistics import panel_statistics, sum_bits
from .kernels.target import target_classes, target_rows
from .parallel.collectives import all_reduce
from .parallel.merge import merge_statistics
from .parallel.shard import VocabShard
from .planner import panel_width, token_chunk


@dataclass(frozen=True)
class LossOptions:
    """What travels below ``functional``."""

    shard: VocabShard
    ignore_index: int


class TokenLosses(torch.autograd.Function):
    """The loss of each token, by the method ``recompute``.

    | tensor | shape | dtype |
    |---|---|---|
    | hidden | [N, D] | fp32, bf16, fp16, fp64 |
    | weight | [V, D] | hidden's |
    | bias | [V] or None | hidden's |
    | targets | [N] | int64 |
    | losses | [N] | fp32 (fp64 for fp64) |

    Forward: ``loss = lse - z`` with ``x = E C^T + b``, ``lse`` the log of the sum of ``exp(x)`` over the whole
    vocabulary and ``z`` the target's logit; 0 for an ignored token. Backward, with ``g`` the upstream gradient:
    ``dx = (exp(x - lse) - onehot) g``, ``dE = dx C`` summed over ranks, ``dC = dx^T E``, ``db`` the sum of ``dx``
    over tokens, a panel of columns at a time. Collectives: two small ones a chunk of tokens in
    ``merge_statistics``, one of dE in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: LossOptions,
    ) -> torch.Tensor:
        shard, n = options.shard, len(hidden)
        ids, order, count = pack_order(targets, options.ignore_index)
        e, c = pack_rows(hidden, order, count), weight[: shard.classes]
        b = None if bias is None else bias[: shard.classes]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logit = torch.zeros(len(e), dtype=wide, device=e.device)
        owned = (ids >= shard.start) & (ids < shard.start + shard.classes)
        bits = sum_bits(shard.vocab_size)
        # from the whole vocabulary's size, so that every rank walks the same chunks
        step = token_chunk(shard.vocab_size, tiles_for(target_of(e.device), e.dtype).BLOCK_V)
        parts = []
        for start in range(0, len(e), step):
            rows = slice(start, min(start + step, len(e)))
            statistics = panel_statistics(e, c, b, ids, count, logit, rows=(rows.start, rows.stop), col0=shard.start)
            parts.append(merge_statistics(statistics, logit[rows], owned[rows], bits, shard.group))  # collectives
        row_max, log_sum, loss = (torch.cat(part) for part in zip(*parts, strict=True)) if parts else 3 * [logit]
        live = torch.arange(n, device=e.device) < count
        ctx.save_for_backward(hidden, weight, bias, order, count, ids, row_max, log_sum, loss)
        ctx.options = options
        return torch.empty_like(loss[:n]).scatter_(0, order, torch.where(live, loss[:n], 0))

    @staticmethod
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            gradients = TokenLosses._gradients(ctx, grad_losses)
        if torch.is_grad_enabled():
            # create_graph: without a node the gradients would pass for constants, also in a penalty on their norm
            gradients = tuple(g if g is None else _Undifferentiable.apply(g.requires_grad_()) for g in gradients)
        return gradients

    @staticmethod
    def _gradients(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, order, count, ids, row_max, log_sum, loss = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        shard: VocabShard = ctx.options.shard
        c, wide = weight[: shard.classes], row_max.dtype
        b = None if bias is None else bias[: shard.classes]
        e = pack_rows(hidden, order, count)
        live = torch.arange(len(hidden), device=e.device) < count
        grad = torch.where(live, grad_losses.to(wide)[order], 0)
        grad, scale = _normalise(torch.nn.functional.pad(grad, (0, len(e) - len(grad))), e.dtype)
        entry = torch.where(grad == 0, 0, torch.expm1(-loss) * grad)
        residual = None if e.dtype == wide else entry - entry.to(e.dtype)
        state = RowState(ids, row_max, log_sum, grad, entry, residual)

        d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
        d_bias = torch.empty_like(bias) if needs_bias else None
        for gradient in (d_weight, d_bias):
            if gradient is not None:
                # padding, and everything where there is no token
                gradient[shard.classes if len(e) else 0 :] = 0
        d_packed = torch.empty(e.shape, dtype=wide, device=e.device) if needs_hidden else None
        reduction = _walk_panels(e, c, b, state, count, scale, shard, d_packed, d_weight, d_bias)
        d_hidden = None
        if d_packed is not None:
            # before the result takes its place
            del e
            if reduction is not None:
                reduction.wait()
            d_hidden = unpack_rows(d_packed, order, count, scale, hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None


def _walk_panels(
    e: torch.Tensor,
    c: torch.Tensor,
    bias: torch.Tensor | None,
    state: RowState,
    count: torch.Tensor,
    scale: torch.Tensor,
    shard: VocabShard,
    d_packed: torch.Tensor | None,
    d_weight: torch.Tensor | None,
    d_bias: torch.Tensor | None,
) -> dist.Work | None:
    """Fills the gradients a panel of columns at a time. Returns the reduction of ``d_packed`` that is under way."""
    touched = None
    if d_packed is not None:
        target_rows(c, state, d_packed, col0=shard.start)
    if d_weight is not None:
        touched = target_classes(e, state, count, scale, d_weight[: len(c)], col0=shard.start)
    (n, d), itemsize = e.shape, e.element_size()
    step = panel_width(n, d, len(c), itemsize, tiles_for(target_of(e.device), e.dtype), multiprocessors(e.device))
    buffer = e.new_empty(n, min(step, round_up(len(c), TILE_V)))
    reduction = None
    for v0 in range(0, len(c) if n else 0, step):
        columns = slice(v0, min(v0 + step, len(c)))
        panel = buffer[:, : columns.stop - v0]
        panel_gradient(
            e, c, bias, state, count, scale, panel,
            v0=v0, col0=shard.start, bias_grad=None if d_bias is None else d_bias[columns],
        )  # fmt: skip
        if d_packed is not None:
            hidden_gradient(panel, c, count, d_packed, v0=v0)
            if columns.stop == len(c):
                # under the last product of the weight's gradient
                reduction = all_reduce(d_packed, shard.group, async_op=True)  # collective
        if d_weight is not None:
            weight_gradient(
                panel, e, count, scale, d_weight[columns], None if touched is None else touched[columns],
                beside_collective=reduction is not None,
            )  # fmt: skip
    if d_packed is not None and reduction is None:
        # a rank without a class or a token takes part all the same
        reduction = all_reduce(d_packed, shard.group, async_op=True)  # collective
    return reduction


class _Undifferentiable(torch.autograd.Function):
    """Identity whose gradient is an error."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("linear_cross_entropy has no second derivative: its gradients cannot be differentiated")


def _normalise(grad: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(grad / scale, scale), for fp16 with scale a power of two that puts the largest of ``grad`` between 2**13 and
    2**14, for other dtypes 1.

    An fp16 panel then neither overflows nor loses small entries, whatever the loss scale. The products carry
    ``scale`` in their epilogues.
    """
    if dtype != torch.float16 or not len(grad):
        return grad, grad.new_ones(())
    # a NaN or inf is its own token's. the bounds are the powers, and their inverses, that fp32 has
    largest = torch.where(grad.isfinite(), grad.abs(), 0).amax()
    exponent = torch.frexp(largest).exponent.clamp(-100, 128) - 14
    return torch.ldexp(grad, -exponent), torch.ldexp(grad.new_ones(()), exponent)
