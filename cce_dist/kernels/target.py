"""The targets' residuals: what a panel's rounding loses of ``(p - 1) g``, added to both gradients in full precision.

Without them every token's largest entry would carry a rounding error as large as that of the result itself.
"""

from __future__ import annotations

import torch

from .gradient import RowState
from .runtime import tl, triton, triton_serves


@triton.jit
def _target_rows_kernel(c_ptr, target_ptr, residual_ptr, out_ptr, V, D, col0, stride_c, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.load(target_ptr + row) - col0
    # a target that is no class of this rank reads nothing
    live = (t >= 0) & (t < V)
    c = tl.load(c_ptr + tl.where(live, t, 0) * stride_c + offs_d, mask=offs_d < tl.where(live, D, 0), other=0.0)
    value = c.to(tl.float32) * tl.load(residual_ptr + row)
    tl.store(out_ptr + row * D + offs_d, tl.where(live, value, 0.0), mask=offs_d < D)


@triton.jit
def _target_classes_kernel(
    e_ptr, target_ptr, residual_ptr, count_ptr, scale_ptr, out_ptr, touched_ptr, V, D, col0, stride_out,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    count = tl.load(count_ptr)
    t = tl.load(target_ptr + first)
    before = tl.load(target_ptr + first - 1, mask=first > 0, other=-1)
    live = (first < count) & (t >= col0) & (t < col0 + V)
    # ids are sorted: the first token of a class adds up the class, in the tokens' order
    if live & ((first == 0) | (before != t)):
        total = tl.zeros((BLOCK_D,), tl.float32)
        n = first
        while n < count:
            offs_n = n + tl.arange(0, BLOCK_N)
            same = tl.load(target_ptr + offs_n, mask=offs_n < count, other=-1) == t
            residual = tl.load(residual_ptr + offs_n, mask=same, other=0.0)
            e = tl.load(
                e_ptr + offs_n[:, None] * D + offs_d[None, :], mask=same[:, None] & (offs_d < D)[None, :], other=0.0
            )
            total += tl.sum(e.to(tl.float32) * residual[:, None], 0)
            n = tl.where(tl.sum(same.to(tl.int32), 0) == BLOCK_N, n + BLOCK_N, count)
        row = t - col0
        # in the result's units, which its dtype is sure to hold
        total *= tl.load(scale_ptr)
        tl.store(out_ptr + row * stride_out + offs_d, total.to(out_ptr.dtype.element_ty), mask=offs_d < D)
        tl.store(touched_ptr + row, 1)


def target_rows(c: torch.Tensor, state: RowState, out: torch.Tensor, *, col0: int) -> None:
    """Starts the gradient of the hidden states: ``out[n] = residual[n] c[target[n]]``, 0 where the target is no class
    of this rank: [V, D], [N] -> [N, D] fp32."""
    if state.residual is None or len(c) == 0 or len(out) == 0:
        out.zero_()
    elif triton_serves(out):
        n, d = out.shape
        block = min(1024, triton.next_power_of_2(d))
        _target_rows_kernel[(n, triton.cdiv(d, block))](
            c, state.targets, state.residual, out, len(c), d, col0, c.stride(0), BLOCK_D=block
        )
    else:
        ids = state.targets - col0
        live = (ids >= 0) & (ids < len(c))
        rows = c[torch.where(live, ids, 0)].to(out.dtype) * state.residual[:, None]
        out.copy_(rows.masked_fill_(~live[:, None], 0))


def target_classes(
    e: torch.Tensor, state: RowState, count: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, *, col0: int
) -> torch.Tensor | None:
    """Starts the gradient of the classifier: ``out[v]`` is the sum of ``residual[n] e[n]`` over the tokens whose
    target is ``v``, in the order of the tokens, times ``scale``, for the classes that have one: [N, D], [N] ->
    [V, D].

    Returns which classes have one, uint8 [V]; the other rows of ``out`` are not written. None where nothing is lost.
    The residuals are small: ``out``'s dtype, of 16 bits, holds enough of them.
    """
    if state.residual is None:
        return None
    touched = torch.zeros(len(out), dtype=torch.uint8, device=out.device)
    if len(e) == 0 or len(out) == 0:
        return touched
    if triton_serves(e):
        n, d = e.shape
        block = min(1024, triton.next_power_of_2(d))
        _target_classes_kernel[(n, triton.cdiv(d, block))](
            e, state.targets, state.residual, count, scale, out, touched, len(out), d, col0, out.stride(0),
            BLOCK_N=4, BLOCK_D=block, num_warps=2,
        )  # fmt: skip
        return touched
    ids = state.targets[: int(count)] - col0
    hit = ((ids >= 0) & (ids < len(out))).nonzero()[:, 0]
    classes, position = ids[hit].unique_consecutive(return_inverse=True)
    sums = state.residual.new_zeros(len(classes), e.shape[1])
    sums.index_add_(0, position, e[hit].to(sums.dtype) * state.residual[hit, None])
    out[classes] = sums.mul_(scale).to(out.dtype)
    touched[classes] = 1
    return touched
