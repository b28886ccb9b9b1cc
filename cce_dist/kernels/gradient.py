"""Second pass: a panel of the logits' gradient, rebuilt from the rows' statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .config import TILE_V, pass_tiles, tiles_for
from .logits import LogitMap, as_logits
from .runtime import (
    as_matrix,
    cdiv,
    descriptors_fit,
    multiprocessors,
    panel_columns,
    target_of,
    tile_source,
    tl,
    triton,
    triton_serves,
)
from .tiles import LOG2E, add_product, any_target, load_tile, next_step, num_tiles, slab_place, store_halves


@dataclass(frozen=True)
class RowState:
    """What a packed row's gradient is made of: all [N], fp32 (fp64 for fp64 operands) but ``targets`` (int64).

    By the logits it is ``p (factor + log_factor log p) + uniform w``, with ``p`` the softmax and ``w`` the classes'
    weights; at the target ``target_entry``. By the scaled product it is that times the slope of what caps them.
    """

    targets: torch.Tensor  # global ids, sorted
    row_max: torch.Tensor
    log_sum: torch.Tensor  # log of the sum of exp(logit - row_max)
    factor: torch.Tensor
    target_entry: torch.Tensor  # times the slope, and formed without cancellation
    # what a panel loses of target_entry in rounding it; the products add it apart. None where a panel rounds nothing
    residual: torch.Tensor | None
    # None for 0
    log_factor: torch.Tensor | None = None
    uniform: torch.Tensor | None = None
    class_weight: torch.Tensor | None = None  # [V], where there is ``uniform``


@triton.jit
def _panel_gradient_kernel(
    e, c, panel, bias_ptr, scale_ptr, class_ptr, target_ptr, row_max_ptr, log_sum_ptr, entry_ptr, factor_ptr,
    log_factor_ptr, uniform_ptr, count_ptr, bias_part_ptr,
    N, V, D, row0, v0, width, col0, softcap, stride_e, stride_c, stride_panel,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_LOG: tl.constexpr, HAS_UNIFORM: tl.constexpr, BIAS_GRAD: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    rows = tl.minimum(N, tl.load(count_ptr).to(tl.int32) - row0)
    num_n = tl.cdiv(tl.maximum(rows, 0), BLOCK_N)
    num_v = tl.cdiv(width, BLOCK_V)
    num_steps = tl.cdiv(D, BLOCK_D)
    FULL: tl.constexpr = (c.dtype if TMA else c.dtype.element_ty) == tl.float32
    tile = tl.program_id(0) - tl.num_programs(0)
    step = num_steps - 1
    n = tile * 0
    v = tile * 0
    x = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    scale = tl.full((BLOCK_N, BLOCK_V), LOG2E, tl.float32)
    here = tile < 0
    lse = tl.zeros((BLOCK_N,), tl.float32)
    factor = tl.zeros((BLOCK_N,), tl.float32)
    log_factor = tl.zeros((BLOCK_N,), tl.float32)
    for _ in range(0, num_tiles(num_n * num_v) * num_steps):
        step, tile, n, v = next_step(step, tile, n, v, num_steps, num_n, num_v, BLOCK_N, BLOCK_V, GROUP_N)
        if step == 0:
            # asked early: the answers take their time
            here = any_target(target_ptr + row0, n, rows, col0 + v0 + v, col0 + v0 + v + BLOCK_V, BLOCK_N)
            offs_n = n + tl.arange(0, BLOCK_N)
            row_max = tl.load(row_max_ptr + row0 + offs_n, mask=offs_n < rows, other=0.0)
            log_sum = tl.load(log_sum_ptr + row0 + offs_n, mask=offs_n < rows, other=0.0)
            factor = tl.load(factor_ptr + row0 + offs_n, mask=offs_n < rows, other=0.0)
            # lse in units of log 2; what its roundings lose is common to the row and joins the factor
            base = row_max * LOG2E
            lse = base + log_sum * LOG2E
            lost = tl.fma(row_max, tl.zeros_like(base) + LOG2E, -base) + (log_sum * LOG2E - (lse - base))
            left = tl.exp2(-lost)
            if HAS_LOG:
                log_factor = tl.load(log_factor_ptr + row0 + offs_n, mask=offs_n < rows, other=0.0) * (1.0 / LOG2E)
                factor -= log_factor * lost
                log_factor *= left
            factor *= left
        a = load_tile(e, row0 + n, step * BLOCK_D, row0 + N, D, stride_e, BLOCK_N, BLOCK_D, TMA)
        b = load_tile(c, v0 + v, step * BLOCK_D, V, D, stride_c, BLOCK_V, BLOCK_D, TMA)
        x = add_product(a, b.T, x, PRECISION)
        if step == num_steps - 1:
            offs_n = n + tl.arange(0, BLOCK_N)
            mask_n = offs_n < rows
            offs_v = v0 + v + tl.arange(0, BLOCK_V)
            y = as_logits(x, bias_ptr, scale_ptr, softcap, offs_v, V, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, FULL)
            x = y * softcap if HAS_SOFTCAP else y
            exponent = tl.fma(x, scale, -lse[:, None])
            if HAS_LOG:
                # of a class whose probability is 0 no part is infinite
                exponent = tl.maximum(exponent, -160.0)
                dx = tl.exp2(exponent) * (factor[:, None] + log_factor[:, None] * exponent)
            else:
                dx = tl.exp2(exponent) * factor[:, None]
            if HAS_UNIFORM:
                uniform = tl.load(uniform_ptr + row0 + offs_n, mask=mask_n, other=0.0)
                dx += uniform[:, None] * tl.load(class_ptr + offs_v, mask=offs_v < V, other=0.0)[None, :]
            x = dx * (1.0 - y * y) if HAS_SOFTCAP else dx
            if here:
                entry = tl.load(entry_ptr + row0 + offs_n, mask=mask_n, other=0.0)
                t = tl.load(target_ptr + row0 + offs_n, mask=mask_n, other=-1) - (col0 + v0 + v)
                t = tl.where((t >= 0) & (t < BLOCK_V), t, -1).to(tl.int32)
                x = tl.where(t[:, None] == tl.arange(0, BLOCK_V)[None, :], entry[:, None], x)
            if n + BLOCK_N > rows:
                # a row past the count sees 0 times the classifier, and the bias: no number where either is infinite
                x = tl.where(mask_n[:, None], x, 0.0)
            if BIAS_GRAD:
                part = v + tl.arange(0, BLOCK_V)
                offs = (n // BLOCK_N).to(tl.int64) * stride_panel + part
                tl.store(bias_part_ptr + offs, tl.sum(x, 0), mask=part < width)
            store_halves(panel, x, n, v, N, width, stride_panel, BLOCK_N, BLOCK_V, TMA)
            x = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)


@triton.jit
def _fold_bias_kernel(
    part_ptr, count_ptr, out_ptr, N, row0, width, stride, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    # a fixed order: the sum is the same in every run
    pointers = part_ptr + offs
    rows = tl.minimum(N, tl.load(count_ptr).to(tl.int32) - row0)
    for _ in range(0, tl.cdiv(tl.maximum(rows, 0), BLOCK_N)):
        total += tl.load(pointers, mask=offs < width, other=0.0)
        pointers += stride
    tl.store(out_ptr + offs, tl.load(out_ptr + offs, mask=offs < width, other=0.0) + total, mask=offs < width)


def panel_gradient(
    e: torch.Tensor,
    c: torch.Tensor,
    logits: LogitMap,
    state: RowState,
    count: torch.Tensor,
    panel: torch.Tensor,
    *,
    row0: int = 0,
    v0: int,
    col0: int,
    bias_grad: torch.Tensor | None,
) -> None:
    """Writes the gradient by the scaled product, that of ``state``, of the rows from ``row0`` and the columns from
    ``v0`` into ``panel`` [n, width].

    Formed in fp32 and rounded once to the panel's dtype. To ``bias_grad`` [width] fp32, where it is given, the sum
    over rows is added, taken before the rounding. Whole row blocks up to ``count`` are written, zero past it.
    """
    if not triton_serves(e):
        _panel_gradient_torch(e, c, logits, state, count, panel, row0, v0, col0, bias_grad)
        return
    target = target_of(e.device)
    tma = descriptors_fit(target, e, c, panel)
    tiles = tiles_for(target, e.dtype, tma)
    (n, width), (num_v, d) = panel.shape, c.shape
    num_n = cdiv(n, tiles.BLOCK_N)
    programs = min(multiprocessors(e.device), num_n * cdiv(width, tiles.BLOCK_V))
    part = (
        torch.empty(num_n, panel.stride(0), dtype=torch.float32, device=e.device) if bias_grad is not None else None
    )
    _panel_gradient_kernel[(programs,)](
        tile_source(e, (tiles.BLOCK_N, tiles.BLOCK_D), tma),
        tile_source(c, (tiles.BLOCK_V, tiles.BLOCK_D), tma),
        tile_source(panel, (tiles.BLOCK_N, tiles.BLOCK_V // 2), tma),
        logits.bias, logits.scale, state.class_weight, state.targets, state.row_max, state.log_sum,
        state.target_entry, state.factor, state.log_factor, state.uniform, count, part,
        n, num_v, d, row0, v0, width, col0, logits.softcap or 0.0, e.stride(0), c.stride(0), panel.stride(0),
        **logits.flags, HAS_LOG=state.log_factor is not None, HAS_UNIFORM=state.uniform is not None,
        BIAS_GRAD=part is not None, TMA=tma, PRECISION="ieee", **tiles.shape,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if bias_grad is not None:
        _fold_bias_kernel[(cdiv(width, 256),)](
            part, count, bias_grad, n, row0, width, panel.stride(0), BLOCK_N=tiles.BLOCK_N, BLOCK=256
        )


SUM_ROWS = 1024


@triton.jit
def _column_sums_kernel(
    panel_ptr, weight_ptr, count_ptr, part_ptr, N, width, row0, stride, rows_panel,
    SLAB: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    part = tl.program_id(1)
    row, column, _ = slab_place(tl.program_id(0) * BLOCK_V, width, rows_panel, SLAB)
    panel_ptr += row.to(tl.int64) * stride + column
    count = tl.minimum(N, tl.load(count_ptr).to(tl.int32) - row0)
    total = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    # the loads run ahead only where the loop itself says so
    for n in tl.range(part * PART, tl.minimum(count, (part + 1) * PART), BLOCK_N, num_stages=3):
        offs_n = n + tl.arange(0, BLOCK_N)
        weight = tl.load(weight_ptr + offs_n, mask=offs_n < count, other=0.0)
        offs = offs_n[:, None].to(tl.int64) * stride + tl.arange(0, BLOCK_V)[None, :]
        x = tl.load(panel_ptr + offs, mask=(offs_n < count)[:, None] & (offs_v < width)[None, :], other=0.0)
        total += x.to(tl.float32) * weight[:, None]
    tl.store(part_ptr + part.to(tl.int64) * width + offs_v, tl.sum(total, 0), mask=offs_v < width)


def column_sums(
    panel: torch.Tensor, weight: torch.Tensor, count: torch.Tensor, out: torch.Tensor, *, row0: int = 0
) -> None:
    """``out += weight @ panel`` over the rows before ``count - row0``: [N], [N, width] or slabs [P, N, K] of that ->
    [width], fp32."""
    n, width = panel.shape[-2], panel_columns(panel)
    if panel.dim() == 3 and not triton_serves(panel):
        for slab, sums in zip(panel, out.view(len(panel), -1), strict=True):
            column_sums(slab, weight, count, sums, row0=row0)
    elif not triton_serves(panel):
        n = max(0, min(n, int(count) - row0))
        for v in range(0, width, TILE_V):
            out[v : v + TILE_V] += weight[:n] @ panel[:n, v : v + TILE_V].to(out.dtype)
    elif panel.numel():
        # parts of the rows, so that there is work for every multiprocessor
        parts, (panel, slab, rows_panel) = out.new_empty(cdiv(n, SUM_ROWS), width), as_matrix(panel)
        _column_sums_kernel[(cdiv(width, 128), len(parts))](
            panel, weight, count, parts, n, width, row0, panel.stride(0), rows_panel, SLAB=slab, PART=SUM_ROWS,
            BLOCK_N=32, BLOCK_V=128,
        )  # fmt: skip
        out += parts.sum(0)


def _panel_gradient_torch(e, c, logits, state, count, panel, row0, v0, col0, bias_grad):
    n = max(0, min(len(panel), int(count) - row0))
    rows = slice(row0, row0 + n)
    wide = torch.promote_types(e.dtype, torch.float32)
    left, ids, entry = e[rows].to(wide), state.targets[rows] - col0 - v0, state.target_entry[rows]
    row_max, log_sum = state.row_max[rows, None], state.log_sum[rows, None]
    step = TILE_V * pass_tiles(n)
    scratch = None if panel.dtype == wide else left.new_empty(n, min(step, panel.shape[1]))
    for v in range(0, panel.shape[1], step):
        w = min(step, panel.shape[1] - v)
        x = panel[:n, v : v + w] if scratch is None else scratch[:, :w]
        torch.mm(left, c[v0 + v : v0 + v + w].to(wide).T, out=x)
        classes = slice(v0 + v, v0 + v + w)
        slopes = logits.apply_(x, classes, slope=True)
        # not their sum: it would be rounded to the precision of the larger
        x.sub_(row_max).sub_(log_sum)
        factor = state.factor[rows, None]
        if state.log_factor is not None:
            # of a class whose probability is 0 no part is infinite
            factor = x.clamp(min=-1e4).mul_(state.log_factor[rows, None]).add_(factor)
        x.exp_().mul_(factor)
        if state.uniform is not None:
            assert state.class_weight is not None
            x.addr_(state.uniform[rows], state.class_weight[classes])
        if slopes is not None:
            x.mul_(slopes)
        hit = ((ids >= v) & (ids < v + w)).nonzero()[:, 0]
        x[hit, ids[hit] - v] = entry[hit]
        if bias_grad is not None:
            bias_grad[v : v + w] += x.sum(0)
        if scratch is not None:
            panel[:n, v : v + w] = x
