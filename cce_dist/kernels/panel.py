"""A panel of logits in full precision, for losses that compare two heads before anything is rounded."""

from __future__ import annotations

import torch

from .config import tiles_for
from .logits import LogitMap, as_logits
from .runtime import cdiv, descriptors_fit, multiprocessors, target_of, tile_source, tl, triton, triton_serves
from .tiles import add_product, halves, load_tile, store_tile, tile_position


@triton.jit
def _finished(x, bias_ptr, softcap, scale, offs_v, V, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    x = as_logits(x, bias_ptr, bias_ptr, softcap, offs_v, V, HAS_BIAS, False, HAS_SOFTCAP, True)
    if HAS_SOFTCAP:
        x *= softcap
    return x * scale


@triton.jit
def _panel_logits_kernel(
    e, c, out_ptr, bias_ptr, count_ptr, N, V, D, row0, v0, width, stride_e, stride_c, stride_out, softcap, scale,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    # rows past the count of tokens are not computed
    rows = tl.maximum(0, tl.minimum(N, tl.load(count_ptr).to(tl.int32) - row0))
    num_n = tl.cdiv(rows, BLOCK_N)
    num_v = tl.cdiv(width, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_n * num_v, tl.num_programs(0), flatten=True):
        pid_n, pid_v = tile_position(tile, num_n, num_v, GROUP_N)
        n = pid_n * BLOCK_N
        v = pid_v * BLOCK_V
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for k in range(0, D, BLOCK_D):
            a = load_tile(e, row0 + n, k, row0 + N, D, stride_e, BLOCK_N, BLOCK_D, TMA)
            b = load_tile(c, v0 + v, k, V, D, stride_c, BLOCK_V, BLOCK_D, TMA)
            acc = add_product(a, b.T, acc, PRECISION)
        # a whole tile of fp32 on its way to memory would fill the shared memory that the loads need
        left, right = halves(acc, BLOCK_N, BLOCK_V)
        W: tl.constexpr = BLOCK_V // 2
        offs_v = v0 + v + tl.arange(0, W)
        left = _finished(left, bias_ptr, softcap, scale, offs_v, V, HAS_BIAS, HAS_SOFTCAP)
        store_tile(out_ptr, left, n, v, rows, width, stride_out, BLOCK_N, W, False)
        right = _finished(right, bias_ptr, softcap, scale, offs_v + W, V, HAS_BIAS, HAS_SOFTCAP)
        store_tile(out_ptr, right, n, v + W, rows, width, stride_out, BLOCK_N, W, False)


def panel_logits(
    e: torch.Tensor,
    c: torch.Tensor,
    logits: LogitMap,
    count: torch.Tensor,
    out: torch.Tensor,
    *,
    row0: int,
    v0: int,
    scale: float = 1.0,
) -> None:
    """``out = scale x``, with ``x`` the ``logits`` (of no scale of their own) of ``e @ c.T``, of the rows from
    ``row0`` and the columns from ``v0``: [N, D], [V, D] -> [n, width] fp32 (fp64 for fp64).

    Rows at or past ``count`` are not computed.
    """
    if not triton_serves(e):
        _panel_logits_torch(e, c, logits, count, out, row0, v0, scale)
        return
    assert logits.scale is None
    (n, width), d = out.shape, e.shape[1]
    target = target_of(e.device)
    tma = descriptors_fit(target, e, c)
    tiles = tiles_for(target, e.dtype, tma)
    programs = min(multiprocessors(e.device), cdiv(n, tiles.BLOCK_N) * cdiv(width, tiles.BLOCK_V))
    _panel_logits_kernel[(programs,)](
        tile_source(e, (tiles.BLOCK_N, tiles.BLOCK_D), tma),
        tile_source(c, (tiles.BLOCK_V, tiles.BLOCK_D), tma),
        out, logits.bias, count, n, len(c), d, row0, v0, width, e.stride(0), c.stride(0), out.stride(0),
        logits.softcap or 0.0, scale,
        HAS_BIAS=logits.bias is not None, HAS_SOFTCAP=logits.softcap is not None, TMA=tma, PRECISION="ieee",
        **tiles.shape, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _panel_logits_torch(e, c, logits, count, out, row0, v0, scale):
    n = max(0, min(len(out), int(count) - row0))
    left = e[row0 : row0 + n].to(out.dtype)
    # operands of 16 bits are widened in pieces, so that the copy stays small
    step = max(1, out.shape[1]) if c.dtype == out.dtype else 4096
    for v in range(0, out.shape[1], step):
        x = out[:n, v : v + step]
        columns = slice(v0 + v, v0 + v + x.shape[1])
        torch.mm(left, c[columns].to(out.dtype).T, out=x)
        logits.apply_(x, columns)
        if scale != 1:
            x *= scale
