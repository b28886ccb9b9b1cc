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
def _pack_rows_kernel(x_ptr, order_ptr, count_ptr, out_ptr, N, D, stride_n, stride_d, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = row < tl.load(count_ptr)
    source = tl.load(order_ptr + row, mask=live, other=0)
    mask = offs_d < tl.where(live, D, 0)
    x = tl.load(x_ptr + source * stride_n + offs_d.to(tl.int64) * stride_d, mask=mask, other=0.0)
    tl.store(out_ptr + row * D + offs_d, x, mask=offs_d < D)


@triton.jit
def _unpack_rows_kernel(x_ptr, order_ptr, count_ptr, scale_ptr, out_ptr, D, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = row < tl.load(count_ptr)
    # what lies past the count was never written, and is not read
    x = tl.load(x_ptr + row * D + offs_d, mask=offs_d < tl.where(live, D, 0), other=0.0) * tl.load(scale_ptr)
    tl.store(out_ptr + tl.load(order_ptr + row) * D + offs_d, x.to(out_ptr.dtype.element_ty), mask=offs_d < D)


def pack_rows(x: torch.Tensor, order: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """``x[order]`` for the first ``count`` rows and zeros after them: [N, D] -> [N rounded up to ROW_GROUP, D]."""
    n, d = x.shape
    out = x.new_empty(round_up(n, ROW_GROUP), d)
    if not triton_serves(x):
        live = int(count)
        torch.index_select(x, 0, order[:live], out=out[:live])
        out[live:] = 0
    elif out.numel():
        # row indices past N are never live, so `order` is not read there
        block = min(1024, triton.next_power_of_2(d))
        grid = (len(out), triton.cdiv(d, block))
        _pack_rows_kernel[grid](x, order, count, out, n, d, x.stride(0), x.stride(1), BLOCK_D=block)
    return out


@triton.jit
def _scale_rows_kernel(x_ptr, scale_ptr, D, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + row * D + offs_d, mask=offs_d < D, other=0.0).to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(x_ptr + row * D + offs_d, x.to(x_ptr.dtype.element_ty), mask=offs_d < D)


def scale_rows(x: torch.Tensor, scale: torch.Tensor) -> None:
    """``x[n] *= scale[n]``: [N, D] contiguous, [N] fp32."""
    n, d = x.shape
    if not triton_serves(x):
        torch.mul(x, scale[:, None], out=x)
    elif x.numel():
        block = min(1024, triton.next_power_of_2(d))
        _scale_rows_kernel[(n, triton.cdiv(d, block))](x, scale, d, BLOCK_D=block)


def unpack_rows(
    x: torch.Tensor, order: torch.Tensor, count: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The inverse of :func:`pack_rows` for fp32 rows, times the device scalar ``scale``, rounded to ``dtype``."""
    n, d = len(order), x.shape[1]
    out = torch.empty(n, d, dtype=dtype, device=x.device)
    if not triton_serves(x):
        live = int(count)
        out[order[:live]] = (x[:live] * scale).to(dtype)
        out[order[live:]] = 0
    elif out.numel():
        block = min(1024, triton.next_power_of_2(d))
        _unpack_rows_kernel[(n, triton.cdiv(d, block))](x, order, count, scale, out, d, BLOCK_D=block)
    return out
