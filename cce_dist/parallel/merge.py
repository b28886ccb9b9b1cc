"""The online softmax over ranks, exact in its order: the same bits on every rank and for every group size."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.distributed as dist

from .collectives import all_reduce


class Statistics(Protocol):
    """What a rank knows of its columns of a chunk of rows (see kernels/statistics.py)."""

    def fold_max(self) -> torch.Tensor: ...

    def fold_sum(self, row_max: torch.Tensor, bits: int) -> torch.Tensor: ...


def merge_statistics(
    statistics: Statistics,
    logit: torch.Tensor,
    owned: torch.Tensor,
    bits: int,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row_max, log_sum, loss) of each row, [n], from every rank's statistics; two collectives of O(n).

    ``lse = row_max + log_sum`` and ``loss = lse - z``, after Milakov and Gimelshein (2018). The sums are 64-bit
    integers relative to the global maximum, so that no order of addition shows. ``logit`` [n] is read where ``owned``
    [n]: where this rank's columns hold the target. A row that holds a NaN or +inf, and one whose target no rank owns,
    gets the loss NaN.
    """
    row_max = statistics.fold_max()
    all_reduce(row_max, group, dist.ReduceOp.MAX)  # collective
    # one owner at most: a sum of bit patterns hands the logit over unchanged
    bit_pattern = torch.where(owned, logit.double().view(torch.int64), 0)
    shares = torch.stack([statistics.fold_sum(row_max, bits), bit_pattern, owned.to(torch.int64)])
    all_reduce(shares, group)  # collective
    row_sum, z, owners = shares[0].double(), shares[1].view(torch.float64), shares[2]
    log_sum = torch.log(row_sum * 2.0**-bits)
    # not (row_max + log_sum) - z: that would lose the loss of a confident token in the rounding of lse
    loss = (row_max.double() - z) + log_sum
    loss = loss.masked_fill((owners != 1) | (row_max == math.inf), math.nan)
    return row_max, log_sum.to(row_max.dtype), loss.to(row_max.dtype)
