"""The two products of the second pass: a panel with C, and its transpose with E."""

from __future__ import annotations

import torch

from .config import tiles_for
from .runtime import (
    as_matrix,
    cdiv,
    descriptors_fit,
    has_tma,
    multiprocessors,
    panel_columns,
    target_of,
    tile_source,
    tl,
    triton,
    triton_serves,
)
from .target import ClassSums
from .tiles import add_product, halves, load_tile, slab_place, store_tile, tile_position


@triton.jit
def _hidden_gradient_kernel(
    panel, c, out, count_ptr, N, V, D, v0, width, row0, stride_panel, rows_panel, stride_c,
    ADD: tl.constexpr, SLAB: tl.constexpr, TMA_OUT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    # here BLOCK_V columns of the result are reduced over the panel's width, BLOCK_D at a time
    rows = tl.maximum(0, tl.minimum(N, tl.load(count_ptr).to(tl.int32) - row0))
    num_n = tl.cdiv(rows, BLOCK_N)
    num_d = tl.cdiv(D, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_n * num_d, tl.num_programs(0), flatten=True):
        pid_n, pid_d = tile_position(tile, num_n, num_d, GROUP_N)
        n = pid_n * BLOCK_N
        d = pid_d * BLOCK_V
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for k in range(0, width, BLOCK_D):
            row, column, columns = slab_place(k, width, rows_panel, SLAB)
            x = load_tile(panel, row + n, column, row + N, columns, stride_panel, BLOCK_N, BLOCK_D, TMA)
            y = load_tile(c, v0 + k, d, V, D, stride_c, BLOCK_D, BLOCK_V, TMA)
            acc = add_product(x, y, acc, PRECISION)
        # a whole tile of fp32 on its way to memory would fill the shared memory that the loads need
        left, right = halves(acc, BLOCK_N, BLOCK_V)
        W: tl.constexpr = BLOCK_V // 2
        if ADD and TMA_OUT:
            # the copy engine adds, so that nothing waits for what was there. each element is added to once a launch:
            # the order of addition is that of the panels
            out.atomic_add([n, d], left)
            out.atomic_add([n, d + W], right)
        else:
            if ADD:
                left += load_tile(out, n, d, rows, D, D, BLOCK_N, W, False)
            store_tile(out, left, n, d, rows, D, D, BLOCK_N, W, TMA_OUT)
            if ADD:
                right += load_tile(out, n, d + W, rows, D, D, BLOCK_N, W, False)
            store_tile(out, right, n, d + W, rows, D, D, BLOCK_N, W, TMA_OUT)


@triton.jit
def _weight_gradient_kernel(
    panel, e, out_ptr, low_ptr, first_ptr, sums_ptr, class_ptr, spread_ptr, scale_ptr, count_ptr,
    N, D, width, row0, stride_panel, rows_panel, stride_e, stride_out,
    HAS_START: tl.constexpr, HAS_SUMS: tl.constexpr, HAS_LOW: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr,
    GROW: tl.constexpr, HAS_UNIFORM: tl.constexpr, SLAB: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    # here BLOCK_N classes by BLOCK_V columns of the result are reduced over the tokens, BLOCK_D at a time
    count = tl.maximum(0, tl.minimum(N, tl.load(count_ptr).to(tl.int32) - row0))
    scale = tl.load(scale_ptr)
    num_v = tl.cdiv(width, BLOCK_N)
    num_d = tl.cdiv(D, BLOCK_V)
    if (ADD and not LAST) or GROW:
        # without a token nothing changes
        num_v = tl.where(count > 0, num_v, 0)
    for tile in tl.range(tl.program_id(0), num_v * num_d, tl.num_programs(0), flatten=True):
        pid_v, pid_d = tile_position(tile, num_v, num_d, GROUP_N)
        v = pid_v * BLOCK_N
        d = pid_d * BLOCK_V
        # asked early where there is a register for it: the answer takes its time
        EARLY: tl.constexpr = TMA and not HAS_LOW
        first = tl.full((BLOCK_N,), -1, tl.int32)
        if EARLY:
            first = first_tokens(first_ptr, v, width, HAS_START or HAS_SUMS, BLOCK_N)
        row, column, columns = slab_place(v, width, rows_panel, SLAB)
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for k in range(0, count, BLOCK_D):
            x = load_tile(panel, row + k, column, row + N, columns, stride_panel, BLOCK_D, BLOCK_N, TMA).T
            y = load_tile(e, k, d, N, D, stride_e, BLOCK_D, BLOCK_V, TMA)
            acc = add_product(x, y, acc, PRECISION)
        left, right = halves(acc, BLOCK_N, BLOCK_V)
        W: tl.constexpr = BLOCK_V // 2
        _store_classes(
            out_ptr, low_ptr, first_ptr, sums_ptr, class_ptr, spread_ptr, first, left, scale, v, d, width, D,
            stride_out, HAS_START, HAS_SUMS, HAS_LOW, ADD, LAST, GROW, HAS_UNIFORM, EARLY, BLOCK_N, W,
        )  # fmt: skip
        _store_classes(
            out_ptr, low_ptr, first_ptr, sums_ptr, class_ptr, spread_ptr, first, right, scale, v, d + W, width, D,
            stride_out, HAS_START, HAS_SUMS, HAS_LOW, ADD, LAST, GROW, HAS_UNIFORM, EARLY, BLOCK_N, W,
        )  # fmt: skip


@triton.jit
def first_tokens(first_ptr, v, width, SUMS: tl.constexpr, ROWS: tl.constexpr):
    offs_v = v + tl.arange(0, ROWS)
    if SUMS:
        return tl.load(first_ptr + offs_v, mask=offs_v < width, other=-1)
    else:
        return tl.full((ROWS,), -1, tl.int32)


@triton.jit
def _store_classes(
    out_ptr, low_ptr, first_ptr, sums_ptr, class_ptr, spread_ptr, first, value, scale, v, d, width, D, stride,
    HAS_START: tl.constexpr, HAS_SUMS: tl.constexpr, HAS_LOW: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr,
    GROW: tl.constexpr, HAS_UNIFORM: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    offs_v = v + tl.arange(0, ROWS)
    offs_d = d + tl.arange(0, COLS)
    offs = offs_v[:, None].to(tl.int64) * stride + offs_d[None, :]
    mask = (offs_v < width)[:, None] & (offs_d < D)[None, :]
    if not EARLY:
        first = first_tokens(first_ptr, v, width, HAS_START or HAS_SUMS, ROWS)
    if HAS_SUMS:
        offs_sums = first[:, None].to(tl.int64) * D + offs_d[None, :]
        value += tl.load(sums_ptr + offs_sums, mask=mask & (first >= 0)[:, None], other=0.0)
    if ADD:
        # what the tokens before these gave, in fp32
        before = tl.load(out_ptr + offs, mask=mask, other=0.0)
        if HAS_LOW:
            before = join_halves(before, tl.load(low_ptr + offs, mask=mask, other=0))
        value += before
    if HAS_UNIFORM:
        spread = tl.load(spread_ptr + offs_d, mask=offs_d < D, other=0.0)
        value += tl.load(class_ptr + offs_v, mask=offs_v < width, other=0.0)[:, None] * spread[None, :]
    if LAST:
        value *= scale
    if HAS_START:
        # the rows of classes without a token hold anything
        value += tl.load(out_ptr + offs, mask=mask & (first >= 0)[:, None], other=0.0).to(tl.float32)
    if GROW:
        value += tl.load(out_ptr + offs, mask=mask, other=0.0)
    if LAST:
        tl.store(out_ptr + offs, value.to(out_ptr.dtype.element_ty), mask=mask)
    elif HAS_LOW:
        high, low = split_halves(value)
        tl.store(out_ptr + offs, high, mask=mask)
        tl.store(low_ptr + offs, low, mask=mask)
    else:
        tl.store(out_ptr + offs, value, mask=mask)


@triton.jit
def split_halves(value):
    """The upper 16 bits of fp32, which are a bf16, and the lower ones, an int16: together they lose nothing."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), bits.to(tl.int16)


@triton.jit
def join_halves(high, low):
    """The inverse of :func:`split_halves`."""
    bits = (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
    return bits.to(tl.float32, bitcast=True)


def hidden_gradient(
    panel: torch.Tensor, c: torch.Tensor, count: torch.Tensor, out: torch.Tensor, *, v0: int, row0: int = 0, add: bool
) -> None:
    """``out = panel @ c[v0:v0 + width]``, or ``+=`` with ``add``, in the rows before ``count - row0``: [N, width] or
    slabs [P, N, K] of that, [V, D] -> [N, D] fp32."""
    if panel.dim() == 3 and not triton_serves(panel):
        for number, slab in enumerate(panel):
            hidden_gradient(slab, c, count, out, v0=v0 + number * slab.shape[1], row0=row0, add=add or number > 0)
        return
    n, width, d = panel.shape[-2], panel_columns(panel), c.shape[1]
    if not triton_serves(panel):
        n, wide = max(0, min(n, int(count) - row0)), out.dtype
        if not add and width == 0:
            # a rank without a class
            out[:n] = 0
        # operands of 16 bits are widened in pieces, so that the copy stays small
        step = max(1, width) if c.dtype == wide else 4096
        for v in range(0, width, step):
            right = c[v0 + v : v0 + min(v + step, width)].to(wide)
            out[:n].addmm_(panel[:n, v : v + step].to(wide), right, beta=1 if add or v else 0)
        return
    target, (panel, slab, rows_panel) = target_of(panel.device), as_matrix(panel)
    tma = descriptors_fit(target, panel, c)
    tiles = tiles_for(target, panel.dtype, tma)
    tma_out = tma and has_tma(target) and d % 4 == 0
    programs = min(multiprocessors(panel.device), cdiv(n, tiles.BLOCK_N) * cdiv(d, tiles.BLOCK_V))
    _hidden_gradient_kernel[(programs,)](
        tile_source(panel, (tiles.BLOCK_N, tiles.BLOCK_D), tma),
        tile_source(c, (tiles.BLOCK_D, tiles.BLOCK_V), tma),
        tile_source(out, (tiles.BLOCK_N, tiles.BLOCK_V // 2), tma_out),
        count, n, len(c), d, v0, width, row0, panel.stride(0), rows_panel, c.stride(0),
        ADD=add, SLAB=slab, TMA_OUT=tma_out, TMA=tma, PRECISION="ieee", **tiles.shape,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def weight_gradient(
    panel: torch.Tensor,
    e: torch.Tensor,
    count: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    *,
    row0: int = 0,
    sums: ClassSums | None = None,
    uniform: tuple[torch.Tensor, torch.Tensor] | None = None,
    low: torch.Tensor | None = None,
    add: bool = False,
    last: bool = True,
    grow: bool = False,
    beside_collective: bool = False,
    beside_product: bool = False,
) -> None:
    """``out = scale (panel.T @ e + sums + uniform)`` over the rows before ``count - row0``, rounded once: [N, width]
    or slabs [P, N, K] of that, [N, D] -> [width, D].

    ``uniform`` ([width], [D]) stands for the outer product of the two. ``sums`` that wait in ``out`` are
    added after the call's scale, so in units of what it leaves there. Where the tokens come in several calls, the
    first takes the sums, the last what is uniform, all but the ``last`` leave their result unscaled in fp32, and all
    but the first ``add`` to it. In
    a bf16 ``out`` the upper halves of that wait, and in ``low`` [width, D] int16 the lower ones. With ``grow`` the
    result is added to what ``out`` holds, a gradient in fp32; several calls then need nothing of that.
    ``beside_collective`` says that a reduction is under way on the same device, ``beside_product`` that another
    product's last tiles are.
    """
    n, width, d = panel.shape[-2], panel_columns(panel), e.shape[1]
    if not triton_serves(panel):
        step = panel.shape[-1]
        for v, part in enumerate(panel if panel.dim() == 3 else [panel]):
            classes = slice(v * step, (v + 1) * step)
            _weight_gradient_torch(
                part, e, count, scale, out[classes], row0, None if sums is None else sums[classes],
                uniform and (uniform[0][classes], uniform[1]), low, add, last, grow,
            )  # fmt: skip
        return
    target, (matrix, slab, rows_panel) = target_of(panel.device), as_matrix(panel)
    tma = descriptors_fit(target, matrix, e)
    tiles = tiles_for(target, panel.dtype, tma)
    num_d = cdiv(d, tiles.BLOCK_V)
    first = max(1, multiprocessors(panel.device) // num_d) * tiles.BLOCK_N
    if slab:
        first = slab
    if beside_collective and width > first:
        # one round of tiles alone: what waits for multiprocessors when it ends is the collective, and not the others
        weight_gradient(
            panel[:1] if slab else panel[:, :first], e, count, scale, out[:first], row0=row0,
            sums=None if sums is None else sums[:first], uniform=uniform and (uniform[0][:first], uniform[1]),
            low=None if low is None else low[:first], add=add, last=last, grow=grow,
        )  # fmt: skip
        panel, out, low = panel[1:] if slab else panel[:, first:], out[first:], None if low is None else low[first:]
        matrix, sums, width = as_matrix(panel)[0], None if sums is None else sums[first:], width - first
        uniform = uniform and (uniform[0][first:], uniform[1])
    programs = cdiv(width, tiles.BLOCK_N) * num_d
    if not (beside_collective or beside_product):
        # where some multiprocessors are taken, the hardware had better deal out the tiles
        programs = min(programs, multiprocessors(panel.device))
    _weight_gradient_kernel[(programs,)](
        tile_source(matrix, (tiles.BLOCK_D, tiles.BLOCK_N), tma),
        tile_source(e, (tiles.BLOCK_D, tiles.BLOCK_V), tma),
        out, low, None if sums is None else sums.first, None if sums is None else sums.rows,
        *(uniform or (None, None)), scale, count,
        n, d, width, row0, matrix.stride(0), rows_panel, e.stride(0), out.stride(0),
        HAS_START=sums is not None and sums.rows is None, HAS_SUMS=sums is not None and sums.rows is not None,
        HAS_LOW=low is not None, ADD=add, LAST=last, GROW=grow, HAS_UNIFORM=uniform is not None, SLAB=slab,
        TMA=tma, PRECISION="ieee", **tiles.shape, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _weight_gradient_torch(panel, e, count, scale, out, row0, sums, uniform, low, add, last, grow):
    n = max(0, min(len(panel), int(count) - row0))
    wide = torch.promote_types(e.dtype, torch.float32)
    # operands of 16 bits are widened in pieces, so that the copy stays small
    step = max(1, len(out)) if e.dtype == wide and not grow else 4096
    right = e[:n].to(wide)
    for v in range(0, len(out), step):
        part = slice(v, v + step)
        # a gradient in full precision grows in its own memory
        value = torch.empty_like(out[part]) if grow else out[part].to(wide)
        hit = None if sums is None else (sums.first[part] >= 0).nonzero()[:, 0]
        start = None if sums is None else (value[hit] if sums.rows is None else sums.rows[sums.first[part][hit]])
        if add and low is not None:
            bits = (out[part].view(torch.int16).to(torch.int32) << 16) | (low[part].to(torch.int32) & 0xFFFF)
            value = bits.view(torch.float32)
        value.addmm_(panel[:n, part].to(wide).T, right, beta=1 if add else 0)
        if sums is not None and sums.rows is not None:
            value[hit] += start
        if uniform is not None:
            value.addr_(uniform[0][part], uniform[1])
        if last:
            value *= scale
        if sums is not None and sums.rows is None:
            value[hit] += start
        if not last and low is not None:
            bits = value.view(torch.int32)
            low[part] = bits.to(torch.int16)
            value = (bits >> 16).to(torch.int16).view(torch.bfloat16)
        if grow:
            out[part] += value
        elif value.dtype != wide or out.dtype != wide:
            out[part] = value
