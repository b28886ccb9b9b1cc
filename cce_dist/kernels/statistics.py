"""First pass: the logits' statistics a tile, and their exact-order fold into one maximum and one sum a row."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .config import TILE_V, pass_tiles, tiles_for
from .logits import LogitMap, as_logits
from .rows import NO_TARGET, ROW_GROUP
from .runtime import (
    as_matrix,
    cdiv,
    descriptors_fit,
    multiprocessors,
    panel_columns,
    round_up,
    target_of,
    tile_source,
    tl,
    triton,
    triton_serves,
)
from .tiles import LOG2E, add_product, any_target, load_tile, next_step, num_tiles, slab_place, store_halves

NOWHERE = tl.constexpr(NO_TARGET)


def sum_bits(vocab_size: int) -> int:
    """Fraction bits of the 64-bit fixed-point sums: as many as leave room for ``vocab_size`` exponentials of 0."""
    return 62 - math.ceil(math.log2(max(vocab_size, 2)))


@triton.jit
def _panel_statistics_kernel(
    e, c, panel, bias_ptr, scale_ptr, class_ptr, target_ptr, reference_ptr, count_ptr,
    tile_max_ptr, tile_sum_ptr, tile_total_ptr, tile_energy_ptr, tile_first_ptr, logit_ptr,
    N, V, D, row0, col0, softcap, stride_e, stride_c, stride_panel, rows_panel, stride_tile,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    TOTAL: tl.constexpr, ENERGY: tl.constexpr, FIRST: tl.constexpr,
    KEEP: tl.constexpr, SLAB: tl.constexpr, TMA: tl.constexpr, TMA_PANEL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_N: tl.constexpr,
):  # fmt: skip
    # rows past the count of valid tokens are not computed
    rows = tl.minimum(N, tl.load(count_ptr).to(tl.int32) - row0)
    num_n = tl.cdiv(tl.maximum(rows, 0), BLOCK_N)
    num_v = tl.cdiv(V, BLOCK_V)
    num_steps = tl.cdiv(D, BLOCK_D)
    FULL: tl.constexpr = (c.dtype if TMA else c.dtype.element_ty) == tl.float32
    tile = tl.program_id(0) - tl.num_programs(0)
    step = num_steps - 1
    n = tile * 0
    v = tile * 0
    x = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    scale = tl.full((BLOCK_N, BLOCK_V), LOG2E, tl.float32)
    here = tile < 0
    reference = tl.zeros((BLOCK_N,), tl.float32)
    for _ in range(0, num_tiles(num_n * num_v) * num_steps):
        step, tile, n, v = next_step(step, tile, n, v, num_steps, num_n, num_v, BLOCK_N, BLOCK_V, GROUP_N)
        if step == 0:
            # asked early: the answers take their time
            here = any_target(target_ptr + row0, n, rows, col0 + v, col0 + v + BLOCK_V, BLOCK_N)
            if KEEP:
                offs_n = n + tl.arange(0, BLOCK_N)
                reference = tl.load(reference_ptr + row0 + offs_n, mask=offs_n < rows, other=0.0)
        a = load_tile(e, row0 + n, step * BLOCK_D, row0 + N, D, stride_e, BLOCK_N, BLOCK_D, TMA)
        b = load_tile(c, v, step * BLOCK_D, V, D, stride_c, BLOCK_V, BLOCK_D, TMA)
        x = add_product(a, b.T, x, PRECISION)
        if step == num_steps - 1:
            offs_n = n + tl.arange(0, BLOCK_N)
            offs_v = v + tl.arange(0, BLOCK_V)
            mask_n = offs_n < rows
            offs_tile = (v // BLOCK_V).to(tl.int64) * stride_tile + offs_n
            x = as_logits(x, bias_ptr, scale_ptr, softcap, offs_v, V, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, FULL)
            if HAS_SOFTCAP:
                x *= softcap
            if TOTAL:
                w = tl.load(class_ptr + offs_v, mask=offs_v < V, other=0.0)[None, :]
                # a class without weight has no part, not even an infinite one
                tl.store(tile_total_ptr + offs_tile, tl.sum(tl.where(w == 0, 0.0, x * w), 1), mask=mask_n)
            # the last step before the maximum, so that nothing makes a phantom column finite again
            if HAS_SOFTCAP:
                x = tl.where((offs_v < V)[None, :], x, float("-inf"))
            else:
                # the units that add have more room than those that select. of 0 times an infinite hidden state comes
                # a NaN, but without a cap so it does of the others
                x += tl.where(offs_v < V, 0.0, float("-inf"))[None, :]
            # the target's logit: at most one tile of one rank holds it
            if here:
                t = tl.load(target_ptr + row0 + offs_n, mask=mask_n, other=-1) - (col0 + v)
                hit = mask_n & (t >= 0) & (t < tl.minimum(BLOCK_V, V - v))
                t = tl.where(hit, t, -1).to(tl.int32)
                z = tl.sum(tl.where(t[:, None] == tl.arange(0, BLOCK_V)[None, :], x, 0.0), 1)
                tl.store(logit_ptr + row0 + offs_n, z, mask=hit)
            m = tl.max(x, 1)
            if FIRST:
                first = tl.min(tl.where(x == m[:, None], (col0 + offs_v)[None, :], NOWHERE), 1)
                tl.store(tile_first_ptr + offs_tile, first, mask=mask_n)
            # a tile whose logits are all -inf sums to 0; a NaN stays NaN
            safe = tl.where(m == float("-inf"), 0.0, m)
            # whole powers of two, whose differences are exact
            base = tl.floor(safe * LOG2E + 0.5)
            left = tl.exp2(-tl.fma(safe, tl.zeros_like(safe) + LOG2E, -base))
            p = tl.exp2(tl.fma(x, scale, -base[:, None]))
            if ENERGY:
                # past the smallest exponential, so that an infinite distance is none
                below = tl.maximum(x - safe[:, None], -110.0)
                tl.store(tile_energy_ptr + offs_tile, tl.sum(p * below, 1) * left, mask=mask_n)
            s = tl.sum(p, 1) * left
            tl.store(tile_max_ptr + offs_tile, m, mask=mask_n)
            tl.store(tile_sum_ptr + offs_tile, s, mask=mask_n)
            if KEEP:
                other = tl.floor(reference * LOG2E + 0.5)
                left = tl.fma(reference, tl.zeros_like(safe) + LOG2E, -other)
                if HAS_SOFTCAP:
                    y = x * (1.0 / softcap)
                    p *= 1.0 - y * y
                # a row that would overflow is written again with another reference
                p *= (tl.exp2(tl.minimum(base - other, 126.0)) * tl.exp2(-left))[:, None]
                if n + BLOCK_N > rows:
                    # a row past the count sees 0 times the classifier, and the bias: no number where either is inf
                    p = tl.where(mask_n[:, None], p, 0.0)
                row, column, width = slab_place(v, V, rows_panel, SLAB)
                store_halves(panel, p, row + n, column, row + N, width, stride_panel, BLOCK_N, BLOCK_V, TMA_PANEL)
            x = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)


@triton.jit
def _fold_max_kernel(
    tile_max_ptr, tile_sum_ptr, row_max_ptr, N, T, stride_tile, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    for t in range(0, T, BLOCK_T):
        offs_t = t + tl.arange(0, BLOCK_T)
        mask = (offs_t < T)[:, None] & (offs_n < N)[None, :]
        offs = offs_t[:, None].to(tl.int64) * stride_tile + offs_n[None, :]
        m = tl.load(tile_max_ptr + offs, mask=mask, other=float("-inf"))
        s = tl.load(tile_sum_ptr + offs, mask=mask, other=0.0)
        # neither integers nor every library's maximum carry a NaN: from here on +inf stands for it
        m = tl.where((m != m) | (s != s), float("inf"), m)
        row_max = tl.maximum(row_max, tl.max(m, 0))
    tl.store(row_max_ptr + offs_n, row_max, mask=offs_n < N)


@triton.jit
def _shares_kernel(
    tile_max_ptr, tile_sum_ptr, tile_total_ptr, tile_energy_ptr, tile_first_ptr,
    maxima_ptr, target_ptr, logit_ptr, out_ptr, first_ptr, N, T, V, col0, stride_tile, one,
    TOTAL: tl.constexpr, ENERGY: tl.constexpr, FIRST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    row_max = tl.load(maxima_ptr + offs_n, mask=mask_n, other=0.0)
    finite = tl.abs(row_max) < float("inf")
    total = tl.zeros((BLOCK_N,), tl.int64)
    energy = tl.zeros((BLOCK_N,), tl.int64)
    logits = tl.zeros((BLOCK_N,), tl.int64)
    first = tl.full((BLOCK_N,), NOWHERE, tl.int32)
    if TOTAL:
        largest = tl.load(maxima_ptr + N + offs_n, mask=mask_n, other=0.0)
        unit = tl.where((largest > 0) & (largest < float("inf")), one / largest.to(tl.float64), 0.0)
    for t in range(0, T, BLOCK_T):
        offs_t = t + tl.arange(0, BLOCK_T)
        mask = (offs_t < T)[:, None] & mask_n[None, :]
        offs = offs_t[:, None].to(tl.int64) * stride_tile + offs_n[None, :]
        m = tl.load(tile_max_ptr + offs, mask=mask, other=float("-inf"))
        s = tl.load(tile_sum_ptr + offs, mask=mask, other=0.0)
        below = m - tl.where(finite, row_max, 0.0)[None, :]
        factor = tl.exp2(below * LOG2E)
        # integers: the order of addition, over tiles here and over ranks later, cannot change the sum
        total += tl.sum(tl.where(finite[None, :], s * factor * one, 0.0).to(tl.int64), 0)
        if ENERGY:
            u = tl.load(tile_energy_ptr + offs, mask=mask, other=0.0) + s * tl.maximum(below, -110.0)
            energy += tl.sum(tl.where(finite[None, :], u * factor * one, 0.0).to(tl.int64), 0)
        if TOTAL:
            part = tl.load(tile_total_ptr + offs, mask=mask, other=0.0).to(tl.float64)
            logits += tl.sum(tl.where((unit > 0)[None, :], part * unit[None, :], 0.0).to(tl.int64), 0)
        if FIRST:
            column = tl.load(tile_first_ptr + offs, mask=mask, other=NOWHERE)
            first = tl.minimum(first, tl.min(tl.where(m == row_max[None, :], column, NOWHERE), 0))
    tl.store(out_ptr + offs_n, total, mask=mask_n)
    if ENERGY:
        tl.store(out_ptr + 3 * N + offs_n, energy, mask=mask_n)
    if TOTAL:
        tl.store(out_ptr + (4 if ENERGY else 3) * N + offs_n, logits, mask=mask_n)
    if FIRST:
        tl.store(first_ptr + offs_n, first.to(tl.int64), mask=mask_n)
    # one owner at most: a sum of bit patterns hands the logit over unchanged
    target = tl.load(target_ptr + offs_n, mask=mask_n, other=-1)
    owned = (target >= col0) & (target < col0 + V)
    z = tl.load(logit_ptr + offs_n, mask=mask_n & owned, other=0.0).to(tl.int32, bitcast=True)
    tl.store(out_ptr + N + offs_n, z.to(tl.int64), mask=mask_n)
    tl.store(out_ptr + 2 * N + offs_n, owned.to(tl.int64), mask=mask_n)


@triton.jit
def _losses_kernel(row_max_ptr, shares_ptr, log_sum_ptr, loss_ptr, N, unit, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    row_max = tl.load(row_max_ptr + offs_n, mask=mask_n, other=0.0)
    total = tl.load(shares_ptr + offs_n, mask=mask_n, other=1)
    z = tl.load(shares_ptr + N + offs_n, mask=mask_n, other=0).to(tl.int32).to(tl.float32, bitcast=True)
    owners = tl.load(shares_ptr + 2 * N + offs_n, mask=mask_n, other=1)
    log_sum = tl.log(total.to(tl.float64) * unit)
    # not (row_max + log_sum) - z: that would lose the loss of a confident token in the rounding of lse
    loss = ((row_max.to(tl.float64) - z.to(tl.float64)) + log_sum).to(tl.float32)
    # a row whose target no rank or several own, and one that holds a NaN or +inf, has no loss
    loss = tl.where((owners != 1) | (row_max == float("inf")), float("nan"), loss)
    tl.store(log_sum_ptr + offs_n, log_sum.to(tl.float32), mask=mask_n)
    tl.store(loss_ptr + offs_n, loss, mask=mask_n)


@dataclass(frozen=True)
class Wanted:
    """What statistics are to say beside the loss: ``entropy`` of the softmax, ``argmax``, the target's ``logit``, and
    with ``class_weight`` [V] fp32 the sum of the logits times it."""

    class_weight: torch.Tensor | None = None
    entropy: bool = False
    argmax: bool = False
    logit: bool = False

    def __getitem__(self, classes: slice) -> Wanted:
        """The same of a range of classes."""
        return self if self.class_weight is None else replace(self, class_weight=self.class_weight[classes])


NOTHING = Wanted()


class RowStatistics(NamedTuple):
    """What is known of each row over the whole vocabulary: [n], fp32 (fp64 for fp64 operands). None where it was not
    wanted."""

    row_max: torch.Tensor
    log_sum: torch.Tensor  # log of the sum of exp(logit - row_max)
    loss: torch.Tensor  # row_max + log_sum - z
    entropy: torch.Tensor | None = None
    total: torch.Tensor | None = None  # sum of the logits, each times its class's weight; fp64
    argmax: torch.Tensor | None = None  # int64, the lowest of several
    logit: torch.Tensor | None = None  # the target's

    @classmethod
    def cat(cls, parts: Sequence[RowStatistics]) -> RowStatistics:
        """Chunks one behind the other."""
        columns: list[Any] = [None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)]
        return cls(*columns)


@dataclass(frozen=True)
class TileStatistics:
    """What a rank knows of its columns of a chunk of rows.

    ``tile_max``, ``tile_sum``: [T, n], fp32 (fp64 for fp64 operands), the maximum and the sum of exponentials of each
    row in each of T tiles of columns; where they are wanted, ``tile_total``: the sum of the logits times their
    class's weight, ``tile_energy``: of ``exp(x - tile_max) (x - tile_max)``, ``tile_first`` int32: the first column
    that holds the maximum. ``targets`` [n] int64 global ids, ``logit`` [n]: the target's where it is among the
    ``num_columns`` columns from ``col0``.
    """

    tile_max: torch.Tensor
    tile_sum: torch.Tensor
    targets: torch.Tensor
    logit: torch.Tensor
    col0: int
    num_columns: int
    keep_logit: bool = False
    tile_total: torch.Tensor | None = None
    tile_energy: torch.Tensor | None = None
    tile_first: torch.Tensor | None = None

    @functools.cached_property
    def row_max(self) -> torch.Tensor:
        """[n]: the largest logit of each row; +inf where a NaN or +inf is among them."""
        num_tiles, n = self.tile_max.shape
        if not triton_serves(self.tile_max):
            if num_tiles == 0:
                return self.tile_max.new_full((n,), -math.inf)
            poisoned = self.tile_max.isnan() | self.tile_sum.isnan()
            return self.tile_max.masked_fill(poisoned, math.inf).amax(0)
        row_max = self.tile_max.new_empty(n)
        _fold_max_kernel[(cdiv(n, 32),)](
            self.tile_max, self.tile_sum, row_max, n, num_tiles, self.tile_max.stride(0), BLOCK_N=32, BLOCK_T=64
        )
        return row_max

    def maxima(self) -> torch.Tensor:
        """[1, n] or, where totals are wanted, [2, n], of which the largest over ranks is taken: ``row_max`` and the
        size of the largest total, the unit that totals are added in."""
        if self.tile_total is None:
            return self.row_max[None]
        if len(self.tile_total) == 0:
            return torch.stack([self.row_max, torch.zeros_like(self.row_max)])
        largest = torch.linalg.vector_norm(self.tile_total, math.inf, 0)
        return torch.stack([self.row_max, largest.nan_to_num_(math.inf, math.inf)])

    def shares(self, maxima: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(sums, first): [3 to 5, n] int64, to be added over ranks, and [n] int64, of which the smallest is taken.

        The sum of exp(logit - row_max) with ``bits`` fraction bits (0 where row_max is not finite), the bit pattern
        of the target's logit and 1 where it is among the columns, else 0; then, where they are wanted, the sum of
        ``exp(logit - row_max) (logit - row_max)`` likewise, and that of totals in units of the largest. ``first``:
        the first column that holds the largest logit.
        """
        num_tiles, n = self.tile_max.shape
        energy, total = self.tile_energy, self.tile_total
        if triton_serves(self.tile_max):
            count = 3 + (energy is not None) + (total is not None)
            sums = torch.empty(count, n, dtype=torch.int64, device=maxima.device)
            first = None if self.tile_first is None else torch.empty_like(sums[0])
            _shares_kernel[(cdiv(n, 32),)](
                self.tile_max, self.tile_sum, total, energy, self.tile_first, maxima, self.targets, self.logit, sums,
                first, n, num_tiles, self.num_columns, self.col0, self.tile_max.stride(0), 2.0**bits,
                TOTAL=total is not None, ENERGY=energy is not None, FIRST=first is not None, BLOCK_N=32, BLOCK_T=64,
            )  # fmt: skip
            return sums, first
        row_max, one = maxima[0], 2.0**bits
        finite = row_max.isfinite()
        below = self.tile_max - torch.where(finite, row_max, 0)
        factor = torch.exp(below)
        owned = (self.targets >= self.col0) & (self.targets < self.col0 + self.num_columns)
        pattern = self.logit.view(torch.int64 if self.logit.dtype == torch.float64 else torch.int32)

        def added(x: torch.Tensor) -> torch.Tensor:
            return torch.where(finite, x * one, 0).to(torch.int64).sum(0)

        parts = [added(self.tile_sum * factor), torch.where(owned, pattern, 0).to(torch.int64), owned.to(torch.int64)]
        if energy is not None:
            parts.append(added((energy + self.tile_sum * below.clamp(min=-1e4)) * factor))
        if total is not None:
            unit = torch.where((maxima[1] > 0) & maxima[1].isfinite(), one / maxima[1].double(), 0)
            parts.append(torch.where(unit > 0, total.double() * unit, 0).to(torch.int64).sum(0))
        first = None
        if self.tile_first is not None:
            hits = torch.where(self.tile_max == row_max, self.tile_first, NO_TARGET)
            first = hits.amin(0).to(torch.int64) if num_tiles else torch.full_like(self.targets, NO_TARGET)
        return torch.stack(parts), first

    def rows(self, maxima: torch.Tensor, sums: torch.Tensor, first: torch.Tensor | None, bits: int) -> RowStatistics:
        """What :meth:`maxima` and :meth:`shares` of all ranks say together. A row that holds a NaN or +inf has a loss
        of NaN and no argmax, -1; one whose target no rank owns has a loss of NaN."""
        n, row_max = maxima.shape[1], maxima[0]
        if triton_serves(row_max):
            log_sum, loss = torch.empty_like(row_max), torch.empty_like(row_max)
            _losses_kernel[(cdiv(n, 128),)](row_max, sums, log_sum, loss, n, 2.0**-bits, BLOCK_N=128)
        else:
            pattern = sums[1] if row_max.dtype == torch.float64 else sums[1].to(torch.int32)
            z = pattern.view(row_max.dtype).double()
            log_sum = torch.log(sums[0].double() * 2.0**-bits)
            # see the kernel
            loss = ((row_max.double() - z) + log_sum).masked_fill((sums[2] != 1) | (row_max == math.inf), math.nan)
            log_sum, loss = log_sum.to(row_max.dtype), loss.to(row_max.dtype)
        entropy = total = None
        if self.tile_energy is not None:
            # no part of it is negative: nothing cancels
            entropy = torch.log(sums[0].double() * 2.0**-bits) - sums[3].double() / sums[0].double()
            entropy = entropy.masked_fill(row_max == math.inf, math.nan).to(row_max.dtype)
        if self.tile_total is not None:
            # an infinite one is that of logits of -inf: +inf is a row's maximum
            largest = maxima[1].double()
            total = torch.where(largest.isfinite(), sums[-1].double() * (2.0**-bits * largest), -largest)
        argmax = None if first is None else torch.where((row_max == math.inf) | (first == NO_TARGET), -1, first)
        pattern = sums[1] if row_max.dtype == torch.float64 else sums[1].to(torch.int32)
        logit = pattern.view(row_max.dtype) if self.keep_logit else None
        return RowStatistics(row_max, log_sum, loss, entropy, total, argmax, logit)


def panel_statistics(
    e: torch.Tensor,
    c: torch.Tensor,
    logits: LogitMap,
    targets: torch.Tensor,
    count: torch.Tensor,
    logit: torch.Tensor,
    *,
    rows: tuple[int, int],
    col0: int,
    wanted: Wanted = NOTHING,
    panels: Sequence[torch.Tensor] = (),
    reference: torch.Tensor | None = None,
    out: TileStatistics | None = None,
) -> TileStatistics:
    """Statistics of the ``logits`` of ``e[rows] @ c.T``, a tile at a time; no logit reaches memory.

    ``e`` [N, D] packed rows, ``c`` [V, D], ``targets`` [N] int64 sorted global ids, ``count`` int64 [] the rows that
    hold a token, ``col0`` the global id of the first column. Writes ``logit`` [N] where a target is among the
    columns, and ``exp(logits - reference)``, times the logits' slope where they are capped, of the first columns into
    ``panels``, one behind the other: [n, K], where K is a multiple of ``TILE_V`` or all that are left, or slabs
    [P, n, K]; ``reference`` [N]. Rows at or past ``count`` are not computed and mean nothing, in the panels zeros up
    to the end of their block of rows. ``out`` is written where it is given.
    """
    start, stop = rows
    num_tiles = cdiv(len(c), tile_columns(e, c))
    if out is None:
        shape, part = (num_tiles, stop - start), slice(start, stop)
        wide = torch.promote_types(e.dtype, torch.float32)
        # rows past the count are read as well
        tile_max, tile_sum = e.new_zeros(2, *shape, dtype=wide)
        out = TileStatistics(
            tile_max, tile_sum, targets[part], logit[part], col0, len(c), wanted.logit,
            e.new_zeros(shape, dtype=wide) if wanted.class_weight is not None else None,
            e.new_zeros(shape, dtype=wide) if wanted.entropy else None,
            e.new_zeros(shape, dtype=torch.int32) if wanted.argmax else None,
        )  # fmt: skip
    if not triton_serves(e):
        panels = [slab for panel in panels for slab in (panel if panel.dim() == 3 else [panel])]
    last = 0
    for columns in (*panels, None):
        first, last = last, len(c) if columns is None else last + panel_columns(columns)
        if first < last and start < stop:
            width, part = tile_columns(e, c), slice(first, last)
            tiles = [None if x is None else x[first // width :] for x in (
                out.tile_max, out.tile_sum, out.tile_total, out.tile_energy, out.tile_first
            )]  # fmt: skip
            _columns_statistics(
                e, c[part], logits[part], wanted[part], targets, count, logit, start, stop, col0 + first, columns,
                reference, *tiles,
            )  # fmt: skip
    return out


def tile_columns(e: torch.Tensor, c: torch.Tensor) -> int:
    """How many columns a tile of statistics covers."""
    if not triton_serves(e):
        return TILE_V
    target = target_of(e.device)
    return tiles_for(target, e.dtype, descriptors_fit(target, e, c)).BLOCK_V


def _columns_statistics(
    e, c, logits, wanted, targets, count, logit, start, stop, col0, panel, reference,
    tile_max, tile_sum, tile_total, tile_energy, tile_first,
):  # fmt: skip
    if not triton_serves(e):
        _columns_statistics_torch(
            e, c, logits, wanted, targets, count, logit, start, stop, col0, panel, reference,
            tile_max, tile_sum, tile_total, tile_energy, tile_first,
        )  # fmt: skip
        return
    (num_v, width), n = c.shape, stop - start
    target = target_of(e.device)
    tma = descriptors_fit(target, e, c)
    tiles = tiles_for(target, e.dtype, tma)
    stride_panel = slab = rows_panel = tma_panel = 0
    if panel is not None:
        panel, slab, rows_panel = as_matrix(panel)
        stride_panel, tma_panel = panel.stride(0), tma and descriptors_fit(target, panel)
    programs = min(multiprocessors(e.device), cdiv(n, tiles.BLOCK_N) * cdiv(num_v, tiles.BLOCK_V))
    _panel_statistics_kernel[(programs,)](
        tile_source(e, (tiles.BLOCK_N, tiles.BLOCK_D), tma),
        tile_source(c, (tiles.BLOCK_V, tiles.BLOCK_D), tma),
        None if panel is None else tile_source(panel, (tiles.BLOCK_N, tiles.BLOCK_V // 2), tma_panel),
        logits.bias, logits.scale, wanted.class_weight, targets, reference, count,
        tile_max, tile_sum, tile_total, tile_energy, tile_first, logit,
        n, num_v, width, start, col0, logits.softcap or 0.0,
        e.stride(0), c.stride(0), stride_panel, rows_panel, tile_max.stride(0),
        **logits.flags, TOTAL=tile_total is not None, ENERGY=tile_energy is not None, FIRST=tile_first is not None,
        KEEP=panel is not None, SLAB=slab, TMA=tma, TMA_PANEL=tma_panel, PRECISION="ieee",
        **tiles.shape, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _columns_statistics_torch(
    e, c, logits, wanted, targets, count, logit, start, stop, col0, panel, reference,
    tile_max, tile_sum, tile_total, tile_energy, tile_first,
):  # fmt: skip
    n = max(0, min(stop, int(count)) - start)
    if n == 0:
        return
    wide = tile_max.dtype
    # whole groups of rows: a product of fewer takes another path, with other bits (see ROW_GROUP)
    left = e[start:stop][: round_up(n, ROW_GROUP)].to(wide)
    ids = targets[start : start + n] - col0
    tiles = cdiv(len(c), TILE_V)
    whole = left.new_empty(min(tiles, pass_tiles(len(left))), len(left), TILE_V)
    for first in range(0, tiles, len(whole)):
        x = whole[: tiles - first]
        part, slopes = slice(first, first + len(x)), []
        for tile, product in enumerate(x, first):
            v = tile * TILE_V
            right = c[v : v + TILE_V].to(wide)
            missing = TILE_V - len(right)
            if missing:
                # products of other widths can take other paths as well
                right = torch.nn.functional.pad(right, (0, 0, 0, missing))
            torch.mm(left, right.T, out=product)
            real = product[:, : TILE_V - missing]
            slope = logits.apply_(real, slice(v, v + TILE_V), panel is not None)
            if slope is not None:
                slopes.append(slope)
            if tile_total is not None:
                w = wanted.class_weight[v : v + TILE_V]
                tile_total[tile, :n] = torch.where(w == 0, 0, real[:n] * w).sum(1)
            product[:, TILE_V - missing :] = -math.inf
        v = first * TILE_V
        here = ids - v
        hit = ((here >= 0) & (here < min(len(c) - v, len(x) * TILE_V))).nonzero()[:, 0]
        logit[start + hit] = x[here[hit] // TILE_V, hit, here[hit] % TILE_V]
        m = x.amax(2)
        if tile_first is not None:
            columns = (
                torch.arange(x.shape[2], dtype=torch.int32)
                + torch.arange(len(x), dtype=torch.int32)[:, None] * TILE_V
            )
            hits = torch.where(x == m[..., None], (columns + (col0 + v))[:, None], NO_TARGET)
            tile_first[part, :n] = hits.amin(2)[:, :n]
        safe = torch.where(m == -math.inf, 0, m)
        x.sub_(safe[..., None])
        below = x.clamp(min=-1e4) if tile_energy is not None else None
        x.exp_()
        tile_max[part, :n] = m[:, :n]
        tile_sum[part, :n] = x.sum(2)[:, :n]
        if tile_energy is not None:
            tile_energy[part, :n] = below.mul_(x).sum(2)[:, :n]
        if panel is not None:
            for tile, slope in zip(x, slopes, strict=False):
                tile[:, : slope.shape[1]] *= slope
            # in fp64: the rounding of the difference would be that of the whole row
            shift = (safe[:, :n].double() - reference[start : start + n]).clamp_(max=87).exp_().to(wide)
            for columns, tile, factor in zip(panel[:n, v:].split(TILE_V, 1), x, shift, strict=False):
                torch.mul(tile[:n, : columns.shape[1]], factor[:, None], out=columns)
