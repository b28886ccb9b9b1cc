"""The two products of the second pass: a gradient panel with C, and its transpose with E."""

from __future__ import annotations

import torch

from .config import tiles_for
from .runtime import (
    cdiv,
    descriptors_fit,
    has_tma,
    multiprocessors,
    target_of,
    tile_source,
    tl,
    triton,
    triton_serves,
)
from .tiles import halves, load_tile, store_tile, tile_position


@triton.jit
def _hidden_gradient_kernel(
    panel, c, out, count_ptr, N, V, D, v0, width, stride_panel, stride_c,
    REDUCE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    # here BLOCK_V columns of the result are reduced over the panel's width, BLOCK_D at a time
    rows = tl.minimum(N, tl.load(count_ptr).to(tl.int32))
    num_n = tl.cdiv(rows, BLOCK_N)
    num_d = tl.cdiv(D, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_n * num_d, tl.num_programs(0), flatten=True):
        pid_n, pid_d = tile_position(tile, num_n, num_d, GROUP_N)
        n = pid_n * BLOCK_N
        d = pid_d * BLOCK_V
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for k in range(0, width, BLOCK_D):
            x = load_tile(panel, n, k, N, width, stride_panel, BLOCK_N, BLOCK_D, TMA)
            y = load_tile(c, v0 + k, d, V, D, stride_c, BLOCK_D, BLOCK_V, TMA)
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        # a whole tile of fp32 on its way to memory would fill the shared memory that the loads need
        left, right = halves(acc, BLOCK_N, BLOCK_V)
        W: tl.constexpr = BLOCK_V // 2
        if REDUCE:
            # the copy engine adds, so that nothing waits for what was there. each element is added to once a launch:
            # the order of addition is that of the panels
            out.atomic_add([n, d], left)
            out.atomic_add([n, d + W], right)
        else:
            left += load_tile(out, n, d, rows, D, D, BLOCK_N, W, False)
            store_tile(out, left, n, d, rows, D, D, BLOCK_N, W, False)
            right += load_tile(out, n, d + W, rows, D, D, BLOCK_N, W, False)
            store_tile(out, right, n, d + W, rows, D, D, BLOCK_N, W, False)


@triton.jit
def _weight_gradient_kernel(
    panel, e, out_ptr, touched_ptr, scale_ptr, count_ptr, N, D, width, stride_panel, stride_e, stride_out,
    HAS_TOUCHED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    # here BLOCK_N classes by BLOCK_V columns of the result are reduced over the tokens, BLOCK_D at a time
    count = tl.minimum(N, tl.load(count_ptr).to(tl.int32))
    scale = tl.load(scale_ptr)
    num_v = tl.cdiv(width, BLOCK_N)
    num_d = tl.cdiv(D, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_v * num_d, tl.num_programs(0), flatten=True):
        pid_v, pid_d = tile_position(tile, num_v, num_d, GROUP_N)
        v = pid_v * BLOCK_N
        d = pid_d * BLOCK_V
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for k in range(0, count, BLOCK_D):
            x = load_tile(panel, k, v, N, width, stride_panel, BLOCK_D, BLOCK_N, TMA).T
            y = load_tile(e, k, d, N, D, stride_e, BLOCK_D, BLOCK_V, TMA)
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        left, right = halves(acc, BLOCK_N, BLOCK_V)
        W: tl.constexpr = BLOCK_V // 2
        _store_classes(
            out_ptr, touched_ptr, left, scale, v, d, width, D, stride_out, HAS_TOUCHED, BLOCK_N, W
        )  # fmt: skip
        _store_classes(
            out_ptr, touched_ptr, right, scale, v, d + W, width, D, stride_out, HAS_TOUCHED, BLOCK_N, W
        )  # fmt: skip


@triton.jit
def _store_classes(
    out_ptr, touched_ptr, value, scale, v, d, width, D, stride, HAS_TOUCHED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    offs_v = v + tl.arange(0, ROWS)
    offs_d = d + tl.arange(0, COLS)
    pointers = out_ptr + offs_v[:, None].to(tl.int64) * stride + offs_d[None, :]
    mask = (offs_v < width)[:, None] & (offs_d < D)[None, :]
    if HAS_TOUCHED:
        # the other classes' rows hold anything
        touched = tl.load(touched_ptr + offs_v, mask=offs_v < width, other=0) != 0
        start = tl.load(pointers, mask=mask & touched[:, None], other=0.0).to(tl.float32)
        value = tl.fma(value, tl.zeros_like(value) + scale, start)
    else:
        value *= scale
    tl.store(pointers, value.to(out_ptr.dtype.element_ty), mask=mask)


def hidden_gradient(panel: torch.Tensor, c: torch.Tensor, count: torch.Tensor, out: torch.Tensor, *, v0: int) -> None:
    """``out += panel @ c[v0:v0 + width]`` in the first ``count`` rows: [N, width], [V, D] -> [N, D] fp32."""
    (n, width), d = panel.shape, c.shape[1]
    if not triton_serves(panel):
        n, wide = int(count), out.dtype
        # operands of 16 bits are widened in pieces, so that the copy stays small
        step = width if c.dtype == wide else 4096
        for v in range(0, width, step):
            right = c[v0 + v : v0 + min(v + step, width)].to(wide)
            out[:n].addmm_(panel[:n, v : v + step].to(wide), right)
        return
    target = target_of(panel.device)
    tma = descriptors_fit(target, panel, c)
    tiles = tiles_for(target, panel.dtype, tma)
    reduce = tma and has_tma(target) and d % 4 == 0
    programs = min(multiprocessors(panel.device), cdiv(n, tiles.BLOCK_N) * cdiv(d, tiles.BLOCK_V))
    _hidden_gradient_kernel[(programs,)](
        tile_source(panel, (tiles.BLOCK_N, tiles.BLOCK_D), tma),
        tile_source(c, (tiles.BLOCK_D, tiles.BLOCK_V), tma),
        tile_source(out, (tiles.BLOCK_N, tiles.BLOCK_V // 2), reduce),
        count, n, len(c), d, v0, width, panel.stride(0), c.stride(0),
        REDUCE=reduce, TMA=tma, PRECISION="ieee", **tiles.shape,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def weight_gradient(
    panel: torch.Tensor,
    e: torch.Tensor,
    count: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    touched: torch.Tensor | None,
    *,
    beside_collective: bool = False,
) -> None:
    """``out = scale panel.T @ e + start`` over the first ``count`` rows, rounded once: [N, width], [N, D] ->
    [width, D].

    ``start`` is what ``out`` holds in the rows that ``touched`` [width] marks, and 0 in the others.
    ``beside_collective`` says that a reduction is under way on the same device.
    """
    (n, width), d = panel.shape, e.shape[1]
    if not triton_serves(panel):
        n, wide = int(count), torch.promote_types(e.dtype, torch.float32)
        product = (panel[:n].to(wide).T @ e[:n].to(wide)).mul_(scale)
        if touched is not None:
            product += torch.where(touched[:, None] != 0, out, 0)
        out.copy_(product)
        return
    target = target_of(panel.device)
    tma = descriptors_fit(target, panel, e)
    tiles = tiles_for(target, panel.dtype, tma)
    programs = cdiv(width, tiles.BLOCK_N) * cdiv(d, tiles.BLOCK_V)
    # beside a collective some multiprocessors are taken: there the hardware had better deal out the tiles
    if not beside_collective:
        programs = min(programs, multiprocessors(panel.device))
    _weight_gradient_kernel[(programs,)](
        tile_source(panel, (tiles.BLOCK_D, tiles.BLOCK_N), tma),
        tile_source(e, (tiles.BLOCK_D, tiles.BLOCK_V), tma),
        out, touched, scale, count, n, d, width, panel.stride(0), e.stride(0), out.stride(0),
        HAS_TOUCHED=touched is not None, TMA=tma, PRECISION="ieee", **tiles.shape,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
