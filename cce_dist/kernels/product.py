"""The two products of the second pass: a gradient panel with C, and its transpose with E."""

from __future__ import annotations

import torch

from .config import tiles_for
from .gradient import RowState
from .runtime import cdiv, descriptors_fit, multiprocessors, target_of, tile_source, tl, triton, triton_serves
from .tiles import load_tile, store_tile, tile_position


@triton.jit
def _target_rows_kernel(
    c_ptr, target_ptr, residual_ptr, out_ptr, V, D, col0, stride_c,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.load(target_ptr + row) - col0
    # a target that is no class of this rank reads nothing
    live = (t >= 0) & (t < V)
    c = tl.load(c_ptr + tl.where(live, t, 0) * stride_c + offs_d, mask=offs_d < tl.where(live, D, 0), other=0.0)
    value = c.to(tl.float32) * tl.load(residual_ptr + row)
    tl.store(out_ptr + row * D + offs_d, tl.where(live, value, 0.0), mask=offs_d < D)


@triton.jit
def _add_to_tile(out_ptr, value, row, col, rows, cols, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    offs_r = row + tl.arange(0, ROWS)
    offs_c = col + tl.arange(0, COLS)
    pointers = out_ptr + offs_r[:, None].to(tl.int64) * stride + offs_c[None, :]
    mask = (offs_r < rows)[:, None] & (offs_c < cols)[None, :]
    tl.store(pointers, tl.load(pointers, mask=mask, other=0.0) + value, mask=mask)


@triton.jit
def _hidden_gradient_kernel(
    panel, c, out_ptr, count_ptr, N, V, D, v0, width, stride_panel, stride_c,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
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
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N, 2, BLOCK_V // 2)), (0, 2, 1)))
        _add_to_tile(out_ptr, left, n, d, rows, D, D, BLOCK_N, BLOCK_V // 2)
        _add_to_tile(out_ptr, right, n, d + BLOCK_V // 2, rows, D, D, BLOCK_N, BLOCK_V // 2)


@triton.jit
def _weight_gradient_kernel(
    panel, e, out, out_ptr, e_ptr, target_ptr, residual_ptr, segment_ptr, scale_ptr, count_ptr,
    N, D, first, width, stride_panel, stride_e, stride_out,
    HAS_RESIDUAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_N: tl.constexpr,
    TOKENS: tl.constexpr,
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
        if HAS_RESIDUAL:
            # sorted by target, the tokens of these classes are neighbours
            offs_d = d + tl.arange(0, BLOCK_V)
            classes = first + v + tl.arange(0, BLOCK_N)
            for k in range(tl.load(segment_ptr + pid_v), tl.load(segment_ptr + pid_v + 1), TOKENS):
                offs_k = k + tl.arange(0, TOKENS)
                mask_k = offs_k < count
                t = tl.load(target_ptr + offs_k, mask=mask_k, other=-1)
                r = tl.load(residual_ptr + offs_k, mask=mask_k, other=0.0)
                x = tl.where(classes[:, None] == t[None, :], r[None, :], 0.0).to(e_ptr.dtype.element_ty)
                pointers = e_ptr + offs_k[:, None].to(tl.int64) * stride_e + offs_d[None, :]
                y = tl.load(pointers, mask=mask_k[:, None] & (offs_d < D)[None, :], other=0.0)
                acc = tl.dot(x, y, acc, input_precision=PRECISION)
        value = (acc * scale).to(out_ptr.dtype.element_ty)
        store_tile(out, value, v, d, width, D, stride_out, BLOCK_N, BLOCK_V, TMA)


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
    tiles = tiles_for(target, panel.dtype)
    tma = descriptors_fit(target, panel, c)
    programs = min(multiprocessors(panel.device), cdiv(n, tiles.BLOCK_N) * cdiv(d, tiles.BLOCK_V))
    _hidden_gradient_kernel[(programs,)](
        tile_source(panel, (tiles.BLOCK_N, tiles.BLOCK_D), tma),
        tile_source(c, (tiles.BLOCK_D, tiles.BLOCK_V), tma),
        out, count, n, len(c), d, v0, width, panel.stride(0), c.stride(0),
        TMA=tma, PRECISION="ieee", **tiles.shape, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def weight_gradient(
    panel: torch.Tensor,
    e: torch.Tensor,
    state: RowState,
    count: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    *,
    first: int,
    beside_collective: bool = False,
) -> None:
    """``out = (panel.T @ e + residuals) scale`` over the first ``count`` rows, rounded once: [N, width], [N, D] ->
    [width, D].

    ``first`` is the global id of the panel's first column. ``beside_collective`` says that a reduction is under way
    on the same device.
    """
    (n, width), d = panel.shape, e.shape[1]
    if not triton_serves(panel):
        n, wide = int(count), torch.promote_types(e.dtype, torch.float32)
        product = panel[:n].to(wide).T @ e[:n].to(wide)
        if state.residual is not None:
            ids = state.targets[:n] - first
            hit = ((ids >= 0) & (ids < width)).nonzero()[:, 0]
            product.index_add_(0, ids[hit], e[hit].to(wide) * state.residual[hit, None])
        out.copy_(product.mul_(scale))
        return
    target = target_of(panel.device)
    tiles = tiles_for(target, panel.dtype)
    tma = descriptors_fit(target, panel, e, out)
    segments = None
    if state.residual is not None:
        bounds = torch.arange(cdiv(width, tiles.BLOCK_N) + 1, device=e.device) * tiles.BLOCK_N + first
        segments = torch.searchsorted(state.targets, bounds.clamp(max=first + width), out_int32=True)
    programs = cdiv(width, tiles.BLOCK_N) * cdiv(d, tiles.BLOCK_V)
    # beside a collective some multiprocessors are taken: there the hardware had better deal out the tiles
    if not beside_collective:
        programs = min(programs, multiprocessors(panel.device))
    _weight_gradient_kernel[(programs,)](
        tile_source(panel, (tiles.BLOCK_D, tiles.BLOCK_N), tma),
        tile_source(e, (tiles.BLOCK_D, tiles.BLOCK_V), tma),
        tile_source(out, (tiles.BLOCK_N, tiles.BLOCK_V), tma),
        out, e, state.targets, state.residual, segments, scale, count,
        n, d, first, width, panel.stride(0), e.stride(0), out.stride(0),
        HAS_RESIDUAL=segments is not None, TMA=tma, PRECISION="ieee", **tiles.shape,
        TOKENS=16,  # the least that a tensor core takes: a tile of classes has few
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
