"""What the targets alone contribute, a row or a class at a time, in full precision.

A target's entry ``(p - 1) g`` is by far the largest of its row: rounded into a panel of 16 bits it would leave both
gradients an error as large as that of their own rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .logits import LogitMap
from .runtime import as_matrix, cdiv, panel_columns, tl, triton, triton_serves


@dataclass(frozen=True)
class ClassSums:
    """Sums over the tokens of each class.

    ``first`` [V] int32: the first token of the class, -1 where it has none. ``rows`` [N, D] fp32: the sum of the
    class, in the row of that token; None where the sums wait in the gradient itself.
    """

    first: torch.Tensor
    rows: torch.Tensor | None

    def __getitem__(self, classes: slice) -> ClassSums:
        """Those of a range of classes."""
        return ClassSums(self.first[classes], self.rows)


@triton.jit
def _target_logits_kernel(
    e_ptr, c_ptr, bias_ptr, target_ptr, out_ptr, V, D, col0, stride_c, HAS_BIAS: tl.constexpr, BLOCK_D: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(target_ptr + row) - col0
    # a target that is no class of this rank reads nothing
    live = (t >= 0) & (t < V)
    t = tl.where(live, t, 0)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for d in range(0, tl.where(live, D, 0), BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        e = tl.load(e_ptr + row * D + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
        acc += e * tl.load(c_ptr + t * stride_c + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
    z = tl.sum(acc, 0)
    if HAS_BIAS:
        z += tl.load(bias_ptr + t, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, z)


@triton.jit
def _drop_targets_kernel(
    panel_ptr, target_ptr, count_ptr, N, K, row0, col0, stride, slab, rows_panel, BLOCK_N: tl.constexpr
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (n < N) & (row0 + n < tl.load(count_ptr))
    t = tl.load(target_ptr + row0 + n, mask=mask, other=-1) - col0
    zero = tl.zeros((BLOCK_N,), panel_ptr.dtype.element_ty)
    mask &= (t >= 0) & (t < K)
    # see slab_place
    row = n + tl.where(mask, t // slab, 0) * rows_panel
    tl.store(panel_ptr + row.to(tl.int64) * stride + t % slab, zero, mask=mask)


@triton.jit
def _target_rows_kernel(
    c_ptr, target_ptr, entry_ptr, scale_ptr, uniform_ptr, spread_ptr, out_ptr, V, D, col0, stride_c,
    HAS_SCALE: tl.constexpr, HAS_UNIFORM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.load(target_ptr + row) - col0
    live = (t >= 0) & (t < V)
    c = tl.load(c_ptr + tl.where(live, t, 0) * stride_c + offs_d, mask=offs_d < tl.where(live, D, 0), other=0.0)
    value = tl.where(live, c.to(tl.float32) * tl.load(entry_ptr + row), 0.0)
    if HAS_SCALE:
        scale = tl.load(scale_ptr + row)
        # a row without a part in the loss, as one past the count, was not computed
        value += tl.load(out_ptr + row * D + offs_d, mask=offs_d < tl.where(scale == 0, 0, D), other=0.0) * scale
    if HAS_UNIFORM:
        value += tl.load(uniform_ptr + row) * tl.load(spread_ptr + offs_d, mask=offs_d < D, other=0.0)
    tl.store(out_ptr + row * D + offs_d, value, mask=offs_d < D)


@triton.jit
def _class_sums_kernel(
    e_ptr, target_ptr, entry_ptr, count_ptr, scale_ptr, out_ptr, first_ptr, N, V, D, row0, col0, stride_e, stride_out,
    COMPACT: tl.constexpr, ADD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    count = tl.minimum(N, tl.load(count_ptr) - row0)
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
            entry = tl.load(entry_ptr + offs_n, mask=same, other=0.0)
            e = tl.load(
                e_ptr + offs_n[:, None] * stride_e + offs_d[None, :],
                mask=same[:, None] & (offs_d < D)[None, :],
                other=0.0,
            )
            total += tl.sum(e.to(tl.float32) * entry[:, None], 0)
            n = tl.where(tl.sum(same.to(tl.int32), 0) == BLOCK_N, n + BLOCK_N, count)
        row = t - col0
        tl.store(first_ptr + row, first.to(tl.int32))
        if COMPACT:
            row = first
        if scale_ptr is not None:
            # in the result's units, which its dtype is sure to hold
            total *= tl.load(scale_ptr)
        if ADD:
            total += tl.load(out_ptr + row * stride_out + offs_d, mask=offs_d < D, other=0.0)
        tl.store(out_ptr + row * stride_out + offs_d, total.to(out_ptr.dtype.element_ty), mask=offs_d < D)


def target_logits(
    e: torch.Tensor, c: torch.Tensor, logits: LogitMap, targets: torch.Tensor, *, col0: int
) -> torch.Tensor:
    """The logit of each row's target, 0 where that is no class of this rank: [N, D], [V, D], [N] -> [N] fp32.

    A reference for exponentials, not the loss's: a tile adds up in another order.
    """
    n, d = e.shape
    out = torch.zeros(n, dtype=torch.promote_types(e.dtype, torch.float32), device=e.device)
    if n == 0 or len(c) == 0:
        return out
    if triton_serves(e):
        block = min(1024, triton.next_power_of_2(d))
        _target_logits_kernel[(n,)](
            e, c, logits.bias, targets, out, len(c), d, col0, c.stride(0), HAS_BIAS=logits.bias is not None,
            BLOCK_D=block,
        )  # fmt: skip
        logits.scaled_(out)
        return out
    ids = targets - col0
    hit = ((ids >= 0) & (ids < len(c))).nonzero()[:, 0]
    out[hit] = (e[hit].to(out.dtype) * c[ids[hit]].to(out.dtype)).sum(1)
    if logits.bias is not None:
        out[hit] += logits.bias[ids[hit]].to(out.dtype)
    logits.scaled_(out)
    return out


def drop_targets(panel: torch.Tensor, targets: torch.Tensor, count: torch.Tensor, *, row0: int, col0: int) -> None:
    """Zeros the targets' entries of ``panel`` [n, K], or of slabs [P, n, K], whose rows are those from ``row0``."""
    n, width = panel.shape[-2], panel_columns(panel)
    if not panel.numel():
        return
    if triton_serves(panel):
        panel, slab, rows_panel = as_matrix(panel)
        _drop_targets_kernel[(cdiv(n, 128),)](
            panel, targets, count, n, width, row0, col0, panel.stride(0), slab or width, rows_panel, BLOCK_N=128
        )
        return
    if panel.dim() == 3:
        for number, slab in enumerate(panel):
            drop_targets(slab, targets, count, row0=row0, col0=col0 + number * slab.shape[1])
        return
    ids = targets[row0 : max(row0, min(row0 + n, int(count)))] - col0
    hit = ((ids >= 0) & (ids < width)).nonzero()[:, 0]
    panel[hit, ids[hit]] = 0


def target_rows(
    c: torch.Tensor,
    targets: torch.Tensor,
    entry: torch.Tensor | None,
    out: torch.Tensor,
    *,
    col0: int,
    scale: torch.Tensor | None = None,
    uniform: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """``out[n] = entry[n] c[targets[n]]``, 0 where the target is no class of this rank, with ``scale`` also plus
    ``scale[n] out[n]``, and with ``uniform`` ([N], [D]) plus their outer product: [V, D], [N] -> [N, D] fp32.
    ``entry`` None stands for zeros."""
    if entry is None or len(c) == 0 or len(out) == 0:
        if scale is None:
            out.zero_()
        else:
            out *= scale[:, None]
        if uniform is not None:
            out.addr_(*uniform)
    elif triton_serves(out):
        n, d = out.shape
        block = min(1024, triton.next_power_of_2(d))
        _target_rows_kernel[(n, cdiv(d, block))](
            c, targets, entry, scale, *(uniform or (None, None)), out, len(c), d, col0, c.stride(0),
            HAS_SCALE=scale is not None, HAS_UNIFORM=uniform is not None, BLOCK_D=block,
        )  # fmt: skip
    else:
        ids = targets - col0
        live = (ids >= 0) & (ids < len(c))
        rows = c[torch.where(live, ids, 0)].to(out.dtype).mul_(entry[:, None]).masked_fill_(~live[:, None], 0)
        if uniform is not None:
            rows.addr_(*uniform)
        out.copy_(rows if scale is None else rows.add_(out * scale[:, None]))


def class_sums(
    e: torch.Tensor,
    targets: torch.Tensor,
    entry: torch.Tensor | None,
    count: torch.Tensor,
    num_classes: int,
    *,
    col0: int,
    row0: int = 0,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    add: bool = False,
) -> ClassSums | None:
    """The sum of ``entry[n] e[n]`` over the tokens of each class, in the order of the tokens: [N, D], [N] -> a row a
    class. Rows of ``e`` are tokens from ``row0``, before ``count``.

    With ``out`` [V, D] the sums go there, times ``scale``, into the rows of the classes that have a token, or with
    ``add`` onto what these hold in full precision; the others are not written. ``entry`` None stands for
    zeros: nothing to sum, None.
    """
    if entry is None:
        return None
    first = torch.full((num_classes,), -1, dtype=torch.int32, device=e.device)
    rows = torch.empty(e.shape, dtype=entry.dtype, device=e.device) if out is None else out
    sums = ClassSums(first, rows if out is None else None)
    if len(e) == 0 or num_classes == 0:
        return sums
    if triton_serves(e):
        n, d = e.shape
        block = min(1024, triton.next_power_of_2(d))
        _class_sums_kernel[(n, cdiv(d, block))](
            e, targets, entry, count, scale, rows, first, n, num_classes, d, row0, col0, e.stride(0), rows.stride(0),
            COMPACT=out is None, ADD=add, BLOCK_N=4, BLOCK_D=block, num_warps=2,
        )  # fmt: skip
        return sums
    ids = targets[: max(0, min(len(e), int(count) - row0))] - col0
    hit = ((ids >= 0) & (ids < num_classes)).nonzero()[:, 0]
    classes, position, sizes = ids[hit].unique_consecutive(return_inverse=True, return_counts=True)
    totals = entry.new_zeros(len(classes), e.shape[1])
    totals.index_add_(0, position, e[hit].to(totals.dtype) * entry[hit, None])
    token = hit[sizes.cumsum(0) - sizes]
    first[classes] = token.to(torch.int32)
    totals = (totals if scale is None else totals * scale).to(rows.dtype)
    rows[token if out is None else classes] = rows[classes] + totals if add else totals
    return sums
