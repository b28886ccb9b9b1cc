"""What several methods do with kernels and collectives."""

from __future__ import annotations

import torch

from ..kernels.gradient import column_sums
from ..kernels.runtime import round_up
from ..kernels.statistics import RowStatistics, TileStatistics, panel_statistics
from ..kernels.target import class_sums, drop_targets, target_logits
from ..parallel.collectives import all_reduce
from .operands import Operands

# exp(64), summed over a vocabulary and multiplied by a classifier, is far from the end of fp32
SAFE = 64.0


def panel_memory(e: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] whose rows start at addresses that the copy engine takes."""
    return e.new_empty(rows, round_up(columns, 64))[:, :columns]


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
    panel: torch.Tensor | None,
    reference: torch.Tensor | None,
) -> TileStatistics:
    """A chunk's statistics, and its exponentials where ``panel`` is given: finite, the targets' entries zero."""

    def run(count: torch.Tensor, out: TileStatistics | None) -> TileStatistics:
        return panel_statistics(
            these.e, these.c, these.logits, these.ids, count, logit, rows=(rows.start, rows.stop),
            col0=these.shard.start, wanted=these.wanted, panel=panel, reference=reference, out=out,
        )  # fmt: skip

    statistics = run(these.count, None)
    if panel is not None and reference is not None:
        # a row far above its reference takes its largest logit instead. where there is none the second run, which
        # the host launches blindly, has no rows
        lost = these.live(rows) & (statistics.row_max - reference[rows] > SAFE)
        reference[rows] = torch.where(lost, statistics.row_max, reference[rows])
        run(torch.where(lost.any(), these.count, 0), statistics)
        drop_targets(panel, these.ids, these.count, row0=rows.start, col0=these.shard.start)
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
