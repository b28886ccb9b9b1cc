"""The online softmax over ranks, exact in its order: the same bits on every rank and for every group size."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from .collectives import all_reduce


class Statistics(Protocol):
    """What a rank knows of its columns of a chunk of n rows (see kernels/statistics.py)."""

    @property
    def row_max(self) -> torch.Tensor: ...

    def shares(self, row_max: torch.Tensor, bits: int) -> torch.Tensor: ...

    def losses(self, row_max: torch.Tensor, shares: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]: ...


def merge_statistics(
    statistics: Statistics, bits: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row_max, log_sum, loss) of each row, [n], from every rank's statistics; two collectives of O(n).

    ``lse = row_max + log_sum`` and ``loss = lse - z``, after Milakov and Gimelshein (2018). The sums are 64-bit
    integers relative to the global maximum, so that no order of addition shows. A row that holds a NaN or +inf, and
    one whose target no rank owns, gets the loss NaN.
    """
    row_max = statistics.row_max
    if group is not None:
        row_max = row_max.clone()
        all_reduce(row_max, group, dist.ReduceOp.MAX)  # collective
    shares = statistics.shares(row_max, bits)
    all_reduce(shares, group)  # collective
    return row_max, *statistics.losses(row_max, shares, bits)
