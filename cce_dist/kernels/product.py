"""The two products of the second pass: a gradient panel with C, and its transpose with E."""

from __future__ import annotations

import torch

from .config import tiles_for
from .runtime import cdiv, descriptors_fit, multiprocessors, target_of, tile_source, tl, triton, triton_serves
from .tiles import load_tile, store_tile, tile_position


@triton.jit
def _add_tile(
    out_ptr, value, row, col, rows, cols, stride, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    offs_r = row + tl.arange(0, ROWS)
    offs_c = col + tl.arange(0, COLS)
    pointers = out_ptr + offs_r[:, None].to(tl.int64) * stride + offs_c[None, :]
    mask = (offs_r < rows)[:, None] & (offs_c < cols)[None, :]
    if ACCUMULATE:
        value += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, value, mask=mask)


@triton.jit
def _product_kernel(
    a, b, out, out_ptr, scale_ptr, count_ptr, M, K, D, k0, M_LIMIT, K_LIMIT, stride_a, stride_b, stride_out,
    TRANSPOSE: tl.constexpr, ACCUMULATE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    # the valid count bounds the rows of the panel: rows of the result, or the reduction where it is transposed
    count = tl.load(count_ptr).to(tl.int32)
    if TRANSPOSE:
        K = tl.minimum(K, count)
    else:
        M = tl.minimum(M, count)
    num_m = tl.cdiv(M, BLOCK_N)
    num_d = tl.cdiv(D, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_m * num_d, tl.num_programs(0), flatten=True):
        pid_m, pid_d = tile_position(tile, num_m, num_d, GROUP_N)
        m = pid_m * BLOCK_N
        d = pid_d * BLOCK_V
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for k in range(0, K, BLOCK_D):
            if TRANSPOSE:
                x = load_tile(a, k, m, K, M_LIMIT, stride_a, BLOCK_D, BLOCK_N, TMA).T
            else:
                x = load_tile(a, m, k, M_LIMIT, K, stride_a, BLOCK_N, BLOCK_D, TMA)
            y = load_tile(b, k0 + k, d, K_LIMIT, D, stride_b, BLOCK_D, BLOCK_V, TMA)
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        if TRANSPOSE:
            acc *= tl.load(scale_ptr)
            store_tile(out, acc.to(out_ptr.dtype.element_ty), m, d, M_LIMIT, D, stride_out, BLOCK_N, BLOCK_V, TMA)
        else:
            # a half at a time: rearranging the whole fp32 tile, or the copy engine's buffer for it, takes 128 KiB of
            # shared memory, more than the loads leave on sm_90
            HALF: tl.constexpr = BLOCK_V // 2
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N, 2, HALF)), (0, 2, 1)))
            _add_tile(out_ptr, left, m, d, M, D, stride_out, ACCUMULATE, BLOCK_N, HALF)
            _add_tile(out_ptr, right, m, d + HALF, M, D, stride_out, ACCUMULATE, BLOCK_N, HALF)


def _launch(a, b, out, count, scale, *, k0, k, transpose, accumulate, persistent=True):
    target = target_of(a.device)
    tiles = tiles_for(target, a.dtype)
    (m, d), n_block, k_block, d_block = out.shape, tiles.BLOCK_N, tiles.BLOCK_D, tiles.BLOCK_V
    tma = descriptors_fit(target, a, b) and (not transpose or descriptors_fit(target, out))
    programs = cdiv(m, n_block) * cdiv(d, d_block)
    # beside a collective some multiprocessors are taken: there the hardware had better deal out the tiles
    if persistent:
        programs = min(programs, multiprocessors(a.device))
    _product_kernel[(programs,)](
        tile_source(a, (k_block, n_block) if transpose else (n_block, k_block), tma),
        tile_source(b, (k_block, d_block), tma),
        tile_source(out, (n_block, d_block), tma and transpose), out, scale, count,
        m, k, d, k0, m, k0 + k, a.stride(0), b.stride(0), out.stride(0),
        TRANSPOSE=transpose, ACCUMULATE=accumulate, TMA=tma, PRECISION="ieee", **tiles.shape,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def hidden_gradient(
    panel: torch.Tensor, c: torch.Tensor, count: torch.Tensor, out: torch.Tensor, *, v0: int, accumulate: bool
) -> None:
    """``out = panel @ c[v0:v0 + width]``, added to ``out`` where ``accumulate``: [N, width], [V, D] -> [N, D] fp32.

    Rows at or past ``count`` are not written.
    """
    width = panel.shape[1]
    if triton_serves(panel):
        _launch(panel, c, out, count, out, k0=v0, k=width, transpose=False, accumulate=accumulate)
        return
    n, wide = int(count), out.dtype
    for v in range(0, width, step := 4096 if c.dtype != wide else max(width, 1)):
        right = c[v0 + v : v0 + min(v + step, width)].to(wide)
        torch.addmm(out[:n], panel[:n, v : v + step].to(wide), right, beta=float(accumulate or v > 0), out=out[:n])


def weight_gradient(
    panel: torch.Tensor,
    e: torch.Tensor,
    count: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    *,
    beside_collective: bool = False,
) -> None:
    """``out = panel.T @ e`` over the first ``count`` rows, times ``scale``, rounded once: [N, width], [N, D] ->
    [width, D]. ``beside_collective`` says that a reduction is under way on the same device."""
    if triton_serves(panel):
        _launch(
            panel, e, out, count, scale,
            k0=0, k=panel.shape[0], transpose=True, accumulate=False, persistent=not beside_collective,
        )  # fmt: skip
        return
    n, wide = int(count), torch.promote_types(e.dtype, torch.float32)
    out.copy_((panel[:n].to(wide).T @ e[:n].to(wide)).mul_(scale))
