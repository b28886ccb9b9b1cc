"""Packing: the rows that hold a token to the front, so that nothing is computed for the others."""

from __future__ import annotations

import torch

from .runtime import round_up, tl, triton, triton_serves

# packed matrices hold a multiple of this many rows: on CPUs a product of fewer than 12 rows takes another path, with
# other bits, and a token's loss must not depend on how many tokens come with it
ROW_GROUP = 16


# the id that stands for no token: past every class, so that ids stay sorted
NO_TARGET = (1 << 31) - 1


def pack_order(targets: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, order, count): the targets [N] sorted, ignored ones last, the permutation that sorts them, and the number
    of tokens that are not ignored as an int64 tensor [].

    ``ids`` is padded as packed rows are; NO_TARGET stands where there is no token. Sorted, since the tokens of a
    tile of classes are then neighbours. Nothing is read back to the host.
    """
    valid = targets != ignore_index
    # what is no class stays none. half of the bits are sorted in half of the time
    keys = torch.where(valid, targets.clamp(-1, NO_TARGET - 1), NO_TARGET).to(torch.int32)
    ids, order = torch.sort(keys, stable=True)
    padding = round_up(len(ids), ROW_GROUP) - len(ids)
    return torch.nn.functional.pad(ids.to(torch.int64), (0, padding), value=NO_TARGET), order, valid.sum()


@triton.jit
def _take_rows_kernel(
    x_ptr, index_ptr, scale_ptr, out_ptr, D, stride_n, stride_d, HAS_SCALE: tl.constexpr, BLOCK_D: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    source = tl.load(index_ptr + row)
    # a row that is not asked for may hold anything, and is not read
    mask = offs_d < tl.where(source >= 0, D, 0)
    x = tl.load(x_ptr + source * stride_n + offs_d.to(tl.int64) * stride_d, mask=mask, other=0.0)
    if HAS_SCALE:
        x = x.to(tl.float32) * tl.load(scale_ptr)
    tl.store(out_ptr + row * D + offs_d, x.to(out_ptr.dtype.element_ty), mask=offs_d < D)


def take_rows(
    x: torch.Tensor, index: torch.Tensor, *, scale: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x[index] * scale``, rounded once to ``dtype`` (x's where None), zero where ``index`` is -1:
    [M, D], [N] int64, [] -> [N, D]."""
    (n, d), dtype = (len(index), x.shape[1]), dtype or x.dtype
    out = torch.empty(n, d, dtype=dtype, device=x.device)
    if not triton_serves(x):
        live = (index >= 0).nonzero()[:, 0]
        rows = x[index[live]]
        out[live] = (rows if scale is None else rows.mul_(scale)).to(dtype)
        out[index < 0] = 0
    elif out.numel():
        block = min(1024, triton.next_power_of_2(d))
        _take_rows_kernel[(n, triton.cdiv(d, block))](
            x, index, scale, out, d, x.stride(0), x.stride(1), HAS_SCALE=scale is not None, BLOCK_D=block
        )
    return out


@triton.jit
def _scale_rows_kernel(
    x_ptr, scale_ptr, count_ptr, out_ptr, D, row0, stride_x, stride_out, STEP: tl.constexpr, BLOCK_D: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = offs_d < tl.where(row < tl.load(count_ptr) - row0 + STEP, D, 0)
    x = tl.load(x_ptr + row * stride_x + offs_d, mask=mask, other=0.0).to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(out_ptr + row * stride_out + offs_d, x.to(out_ptr.dtype.element_ty), mask=mask)


def scale_rows(
    x: torch.Tensor, scale: torch.Tensor, count: torch.Tensor, out: torch.Tensor, *, row0: int = 0
) -> None:
    """``out[n] = scale[n] x[n]``, in the memory of ``x`` or another, of the rows before ``count - row0`` and of the
    step of a product that they end in: [N, D], [N] fp32."""
    n, d = x.shape
    if not triton_serves(x):
        torch.mul(x, scale[:, None], out=out)
    elif x.numel():
        block = min(1024, triton.next_power_of_2(d))
        _scale_rows_kernel[(n, triton.cdiv(d, block))](
            x, scale, count, out, d, row0, x.stride(0), out.stride(0), STEP=64, BLOCK_D=block
        )


@triton.jit
def _row_dots_kernel(x_ptr, y_ptr, count_ptr, out_ptr, D, row0, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    live = row0 + row < tl.load(count_ptr)
    total = tl.zeros((BLOCK_D,), tl.float32)
    # a row without a token may hold anything
    for d in range(0, tl.where(live, D, 0), BLOCK_D):
        offs_d = d + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + row * D + offs_d, mask=offs_d < D, other=0.0)
        total += x * tl.load(y_ptr + row * D + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(total, 0))


def row_dots(x: torch.Tensor, y: torch.Tensor, count: torch.Tensor, *, row0: int = 0) -> torch.Tensor:
    """``sum_d x[n, d] y[n, d]`` of the rows before ``count - row0``, 0 for the others: [N, D] fp32 and of any dtype,
    contiguous -> [N] fp32."""
    n, d = x.shape
    out = torch.zeros(n, dtype=x.dtype, device=x.device)
    if not triton_serves(x):
        for start in range(0, max(0, min(n, int(count) - row0)), 256):
            rows = slice(start, min(start + 256, int(count) - row0))
            out[rows] = (x[rows] * y[rows]).sum(1)
    elif out.numel():
        block = min(1024, triton.next_power_of_2(d))
        _row_dots_kernel[(n,)](x, y, count, out, d, row0, BLOCK_D=block)
    return out


def packing(ids: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The token that each packed row holds, -1 where it holds none: the index by which :func:`take_rows` packs."""
    padded = torch.nn.functional.pad(order, (0, len(ids) - len(order)))
    return torch.where(ids == NO_TARGET, -1, padded)


def unpacking(ids: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The packed row of each token, -1 where it is ignored: the index by which :func:`take_rows` unpacks."""
    rows = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, torch.where(ids[: len(order)] == NO_TARGET, -1, rows))
