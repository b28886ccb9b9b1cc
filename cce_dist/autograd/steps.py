"""What several methods do with kernels and collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..kernels.config import TILE_V, tiles_for
from ..kernels.gradient import column_sums
from ..kernels.runtime import panel_columns, round_up, target_of
from ..kernels.statistics import RowStatistics, TileStatistics, panel_statistics
from ..kernels.target import class_sums, drop_targets, target_logits
from ..parallel.collectives import all_reduce
from ..planner import most_slabs, slab_batches, slab_start
from .operands import Operands

# exp(64), summed over a vocabulary and multiplied by a classifier, is far from the end of fp32
SAFE = 64.0


def panel_memory(e: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] whose rows start at addresses that the copy engine takes."""
    return e.new_empty(rows, round_up(columns, 64))[:, :columns]


@dataclass(frozen=True)
class Kept:
    """Exponentials that wait for backward: of the first columns ``lent`` [P, N, slab] in ``gradient`` [V, D], the
    classifier's to be, of the next ones ``own`` [N, K] in memory of their own. None where there are none. ``slabs``:
    the slabs by which the gradient can be written."""

    gradient: torch.Tensor | None = None
    lent: torch.Tensor | None = None
    own: torch.Tensor | None = None
    slabs: tuple[slice, ...] = ()

    @classmethod
    def start(cls, these: Operands, weight: torch.Tensor, needs_weight: bool) -> Kept:
        """Memory for what the plan keeps, which is that of an even share of the vocabulary."""
        plan, num_v, gradient = these.options.plan, len(these.c), None
        if needs_weight and these.options.main_grad is None and _slabs(these)[-1]:
            gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
            # the product over the tokens reads whole steps
            _lent(these, gradient)[:, these.num_rows :] = 0
        kept = cls.of(these, gradient, None)
        # a rank whose classifier is frozen has no such gradient, and so room for as much
        own = plan.kept - (0 if gradient is None else plan.lent)
        # a larger share keeps whole tiles
        own = num_v - kept.columns if kept.columns + own >= num_v else own // TILE_V * TILE_V
        return replace(kept, own=panel_memory(these.c, these.num_rows, own) if own else None)

    @classmethod
    def of(cls, these: Operands, gradient: torch.Tensor | None, own: torch.Tensor | None) -> Kept:
        """What is kept in ``gradient`` and in ``own``."""
        if gradient is None:
            return cls(own=own)
        lent = _lent(these, gradient)[:, : these.num_rows]
        return cls(gradient, lent, own, tuple(slab_batches(*_slabs(these))))

    @property
    def columns(self) -> int:
        return sum(panel_columns(panel) for _, panel in self.panels())

    def panels(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """(columns, panel) of both."""
        start = 0
        for panel in (self.lent, self.own):
            if panel is not None:
                yield slice(start, start + panel_columns(panel)), panel
                start += panel_columns(panel)

    def batches(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """(columns, panel) such that the columns' rows of the gradient hold nothing but batches that came before."""
        for columns, panel in self.panels():
            if panel is not self.lent:
                yield columns, panel
                continue
            slab = panel.shape[2]
            for slabs in self.slabs:
                yield slice(slabs.start * slab, slabs.stop * slab), panel[slabs]


NOTHING_KEPT = Kept()


def _slabs(these: Operands) -> tuple[int, int, int, int, int]:
    """Arguments of :func:`slab_batches`. An uneven share of the vocabulary may have memory for other slabs than were
    planned."""
    plan, (num_v, d) = these.options.plan, these.c.shape
    rows, slabs = round_up(these.num_rows, tiles_for(target_of(these.c.device), these.c.dtype).BLOCK_N), 0
    if plan.lent and rows:
        slabs = min(plan.lent // plan.slab, most_slabs(rows, d, num_v, plan.slab))
    return rows, d, num_v, plan.slab, slabs


def _lent(these: Operands, gradient: torch.Tensor) -> torch.Tensor:
    """The slabs, of whole tiles of rows, at the end of ``gradient``, which is written last."""
    rows, d, num_v, slab, slabs = _slabs(these)
    first = slab_start(rows, d, num_v, slab, slabs)
    return gradient.view(-1)[first : first + slabs * rows * slab].view(slabs, rows, slab)


def references(these: Operands) -> torch.Tensor:
    """A reference for the exponentials of each row: near its target's logit."""
    reference = target_logits(these.e, these.c, these.logits, these.ids, col0=these.shard.start)
    all_reduce(reference, these.shard.group)  # collective
    return reference


def softmax_scale(reference: torch.Tensor, rows: RowStatistics) -> torch.Tensor:
    """``exp(reference - lse)``: what is left to multiply the exponentials of a row with. In fp64, since the rounding
    of the difference would be that of the whole row."""
    return torch.exp(reference.double() - rows.row_max.double() - rows.log_sum.double()).to(reference.dtype)


def weighted_sum(matrix: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``weight @ matrix``, in fp32: [n], [n, D] -> [D]."""
    out = torch.zeros(matrix.shape[1], dtype=weight.dtype, device=matrix.device)
    count = torch.full((), len(matrix), device=matrix.device)
    column_sums(matrix, weight, count, out)
    return out


def chunk_statistics(
    these: Operands,
    rows: slice,
    logit: torch.Tensor,
    panels: Sequence[torch.Tensor],
    reference: torch.Tensor | None,
) -> TileStatistics:
    """A chunk's statistics, and the exponentials of the columns that ``panels`` have, one behind the other: finite,
    the targets' entries zero."""

    def run(count: torch.Tensor, out: TileStatistics | None) -> TileStatistics:
        return panel_statistics(
            these.e, these.c, these.logits, these.ids, count, logit, rows=(rows.start, rows.stop),
            col0=these.shard.start, wanted=these.wanted, panels=panels, reference=reference, out=out,
        )  # fmt: skip

    statistics = run(these.count, None)
    if reference is not None:
        # a row far above its reference takes its largest logit instead. where there is none the second run, which
        # the host launches blindly, has no rows
        lost = these.live(rows) & (statistics.row_max - reference[rows] > SAFE)
        reference[rows] = torch.where(lost, statistics.row_max, reference[rows])
        run(torch.where(lost.any(), these.count, 0), statistics)
        col0 = these.shard.start
        for panel in panels:
            drop_targets(panel, these.ids, these.count, row0=rows.start, col0=col0)
            col0 += panel_columns(panel)
    return statistics


def add_bias_gradient(out: torch.Tensor, these: Operands, entry: torch.Tensor, uniform: torch.Tensor | None) -> None:
    """Adds what the panels of the first ``len(out)`` classes lack, summed over tokens in fp32: the targets' entries,
    unscaled, and what is uniform."""
    ones = torch.ones(len(entry), 1, dtype=these.c.dtype, device=out.device)
    sums = class_sums(ones, these.ids, entry, these.count, len(out), col0=these.shard.start)
    if sums is not None and sums.rows is not None and len(entry):
        out += torch.where(sums.first >= 0, sums.rows[sums.first.clamp(min=0).long(), 0], 0)
    if uniform is not None and these.class_weight is not None:
        out += these.class_weight[: len(out)] * uniform.sum()
