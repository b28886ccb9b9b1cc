"""The online softmax over ranks, exact in its order: the same bits on every rank and for every group size."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from .collectives import all_reduce

Rows = TypeVar("Rows", covariant=True)


class Statistics(Protocol[Rows]):
    """What a rank knows of its columns of a chunk of n rows (see kernels/statistics.py)."""

    def maxima(self) -> torch.Tensor: ...

    def shares(self, maxima: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def rows(self, maxima: torch.Tensor, sums: torch.Tensor, first: torch.Tensor | None, bits: int) -> Rows: ...


def merge_statistics(statistics: Statistics[Rows], bits: int, group: dist.ProcessGroup | None) -> Rows:
    """What is known of each row, from every rank's statistics; two collectives of O(n), three with an argmax.

    After the online softmax of Milakov and Gimelshein (2018). The sums are 64-bit integers relative to global maxima,
    so that no order of addition shows.
    """
    maxima = statistics.maxima()
    if group is not None:
        maxima = maxima.clone()
    all_reduce(maxima, group, dist.ReduceOp.MAX)  # collective
    sums, first = statistics.shares(maxima, bits)
    all_reduce(sums, group)  # collective
    if first is not None:
        all_reduce(first, group, dist.ReduceOp.MIN)  # collective
    return statistics.rows(maxima, sums, first, bits)
