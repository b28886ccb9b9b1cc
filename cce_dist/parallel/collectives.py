"""Collectives, each as a raw call and, where a gradient flows through it, as an autograd Function. The group is an
argument; ``None`` is one rank and communicates nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank inside ``group``, and the group's size; ``ValueError`` where it is no member."""
    if group is None:
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: this process is not a member of the process group that was passed")
    return rank, dist.get_world_size(group)


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM, *, async_op: bool = False
) -> dist.Work | None:
    """In place. With ``async_op`` the caller waits on what is returned."""
    if group is None or group.size() == 1:
        return None
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def all_gather_rows(tensor: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """[n_r, ...] of each rank, n_r from ``sizes`` -> [sum of sizes, ...]."""
    if group is None or group.size() == 1:
        return tensor
    parts = [tensor.new_zeros(max(sizes), *tensor.shape[1:]) for _ in sizes]
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def gather_slices(
    x: torch.Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup | None
) -> Callable[[], torch.Tensor]:
    """Starts the gather of the ranks' slices [n_r, D], n_r from ``sizes``. What is returned waits for them: [R L, D]
    with L the longest slice's length, the slice of rank r from row r L on, and anything after a shorter one."""
    if group is None or group.size() == 1:
        return lambda: x
    longest = max(sizes)
    if len(x) < longest:
        x = torch.nn.functional.pad(x, (0, 0, 0, longest - len(x)))
    out = x.new_empty(len(sizes) * longest, x.shape[1])
    work = dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return out

    return wait


def scatter_sums(x: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, dist.Work | None]:
    """Starts the sum over ranks of [R L, D], of which each rank gets its [L, D]; the caller waits on the second."""
    if group is None or group.size() == 1:
        return x, None
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    return out, dist.reduce_scatter_tensor(out, x, group=group, async_op=True)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # each rank's share is reduced in fp32, whatever the dtype of the hidden states
        total = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True).contiguous()
        all_reduce(total, ctx.group)  # collective
        return total.to(grad.dtype), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        all_reduce(total, group)  # collective
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
        rank, _ = rank_and_size(group)
        ctx.columns = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        return all_gather_rows(x.movedim(-1, 0).contiguous(), sizes, group).movedim(0, -1)  # collective

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad[..., ctx.columns], None, None


def copy_to_group(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Identity in forward, all-reduce of the gradient in backward: where a replicated tensor enters sharded work."""
    return _CopyToGroup.apply(x, group)


def reduce_from_group(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-reduce in forward, identity in backward: where the ranks' shares become a replicated tensor."""
    return _ReduceFromGroup.apply(x, group)


def gather_columns(x: torch.Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """[..., n_r] of each rank -> [..., sum of sizes] on every rank; backward keeps the rank's own columns."""
    return _GatherColumns.apply(x, sizes, group)
