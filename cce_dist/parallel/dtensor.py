"""DTensors at the edges of the loss: their local tensors, the shard that their placements imply, and the placements
of their gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .shard import VocabShard

_FSDP = (
    "FSDP leaves a parameter sharded outside the forward of its module: call the loss inside it, or see "
    "torch.distributed.fsdp.register_fsdp_forward_method"
)


class LocalOperands(NamedTuple):
    """This rank's plain tensors, and the shard that ``weight`` is."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    shard: VocabShard | None


def implied_shard(weight: torch.Tensor) -> VocabShard:
    """See :meth:`VocabShard.from_dtensor`."""
    if not isinstance(weight, DTensor):
        raise TypeError(f"weight must be a DTensor, got {type(weight).__name__}")
    return _shard_on(weight.device_mesh, _vocabulary_axis(weight), weight.shape[0])


def group_hint(weight: object, *others: object) -> VocabShard | None:
    """A shard over whose group the ranks can tell each other what is wrong with their operands, if there is one."""
    for tensor in (weight, *others):
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None:
            mesh, axes = tensor.device_mesh, [0]
            if mesh.ndim > 1:
                # of hidden's axes any may be the vocabulary's
                axes = [a for a, p in enumerate(tensor.placements) if _shards(p, 0)] if tensor is weight else []
            if len(axes) == 1:
                return _shard_on(mesh, axes[0], max(1, tensor.shape[0] if tensor.dim() else 1))
    return None


def to_local(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    shard: VocabShard | None,
) -> LocalOperands:
    """The operands of a call of which some are DTensors, as plain tensors through which gradients become DTensors.

    | tensor | on the vocabulary's axis of the mesh | on its other axes | gradient |
    |---|---|---|---|
    | weight, bias | Shard(0) | Replicate | Shard(0); Partial on other axes that shard hidden, else Replicate |
    | hidden | Replicate or plain; Shard(a dimension but the last): sequence parallel | the same | as hidden is |
    | targets | Replicate or plain | as hidden is | |

    A plain tensor counts as replicated. A plain weight goes with ``shard``, whose group is that of an axis of the
    mesh. No collective.

    Raises ``TypeError`` for a plain tensor where a DTensor is needed, ``ValueError`` for other placements, for
    tensors on different meshes and for a ``shard`` that the placements contradict.
    """
    named = {"weight": weight, "hidden": hidden, "bias": bias, "targets": targets}
    tensors = {name: tensor for name, tensor in named.items() if isinstance(tensor, DTensor)}
    first, mesh = next((name, tensor.device_mesh) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        if tensor.device_mesh != mesh:
            raise ValueError(f"{name} is a DTensor on {tensor.device_mesh}, {first} on {mesh}: expected one mesh")

    if isinstance(weight, DTensor):
        axis = _vocabulary_axis(weight)
        if isinstance(bias, torch.Tensor) and not isinstance(bias, DTensor):
            raise TypeError(
                f"bias is a plain tensor, weight a DTensor: expected a DTensor on {mesh}, Shard(0) as weight"
            )
        if isinstance(bias, DTensor) and bias.placements != weight.placements:
            raise ValueError(
                f"bias has the placements {bias.placements}, expected those of weight, {weight.placements}"
            )
    else:
        axis = _axis_of(mesh, first, shard)
        if isinstance(bias, DTensor):
            raise TypeError("bias is a DTensor, weight a plain tensor: expected both to be the same kind")

    placements = _check_hidden(hidden, axis) if isinstance(hidden, DTensor) else (Replicate(),) * mesh.ndim
    gathered = _shards(placements[axis])
    if isinstance(targets, DTensor):
        expected = tuple(Replicate() if a == axis else p for a, p in enumerate(placements))
        if targets.placements != expected:
            raise ValueError(f"targets has the placements {targets.placements}, expected {expected} on {mesh}")
    if isinstance(weight, DTensor):
        if not isinstance(hidden, DTensor) and isinstance(shard, VocabShard):
            gathered = shard.sequence_parallel
        # not the shard that was passed: all ranks must use one group, whether they pass a shard or not
        implied = _shard_on(mesh, axis, weight.shape[0], gathered)
        shard = implied if shard is None else _agreeing(shard, implied)
    elif isinstance(hidden, DTensor) and shard is not None and gathered != shard.sequence_parallel:
        raise ValueError(
            f"shard has sequence_parallel={shard.sequence_parallel}, expected {gathered} for hidden with the "
            f"placements {placements}"
        )

    # what the tokens of other data-parallel ranks add is theirs to sum
    grads = [Shard(0) if a == axis else Partial() if _shards(p) else Replicate() for a, p in enumerate(placements)]
    return LocalOperands(
        hidden.to_local(grad_placements=placements) if isinstance(hidden, DTensor) else hidden,
        weight.to_local(grad_placements=grads) if isinstance(weight, DTensor) else weight,
        bias.to_local(grad_placements=grads) if isinstance(bias, DTensor) else bias,
        targets.to_local() if isinstance(targets, DTensor) else targets,
        shard,
    )


def any_dtensor(*operands: object) -> bool:
    return any(isinstance(operand, DTensor) for operand in operands)


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself of one that a collective may still be writing, as DTensor's redistribution returns."""
    return _Waited.apply(tensor) if isinstance(tensor, AsyncCollectiveTensor) else tensor


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> torch.Tensor:
        waited = tensor.wait()
        return waited.view_as(waited)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _shards(placement: Placement, dim: int | None = None) -> bool:
    # by type: a strided shard has rows from several places
    return type(placement) is Shard and (dim is None or placement.is_shard(dim))


def _vocabulary_axis(weight: DTensor) -> int:
    axes = [axis for axis, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(axes) != 1 or not _shards(weight.placements[axes[0]], 0):
        hint = "; of a whole weight pass weight.to_local()" if not axes else f". {_FSDP}" if len(axes) > 1 else ""
        raise ValueError(
            f"weight has the placements {weight.placements} on {weight.device_mesh}, expected Shard(0) on one "
            f"axis of the mesh and Replicate on the others{hint}"
        )
    return axes[0]


def _axis_of(mesh: DeviceMesh, name: str, shard: VocabShard | None) -> int:
    """The axis of the mesh whose group is that of a plain weight's shard."""
    if not isinstance(shard, VocabShard) or shard.group is None:
        raise TypeError(
            f"weight is a plain tensor, {name} a DTensor: expected weight as a DTensor with Shard(0) on one axis of "
            f"{mesh}, or a shard over the group of one"
        )
    members = dist.get_process_group_ranks(shard.group)
    for axis in range(mesh.ndim):
        if dist.get_process_group_ranks(mesh.get_group(axis)) == members:
            return axis
    raise ValueError(f"shard is over the ranks {members}, {name} on {mesh}: expected the group of one of its axes")


def _check_hidden(hidden: DTensor, axis: int) -> tuple[Placement, ...]:
    placements, last = hidden.placements, hidden.dim() - 1
    for index, placement in enumerate(placements):
        if not placement.is_replicate() and not (_shards(placement) and not placement.is_shard(last)):
            raise ValueError(
                f"hidden has the placements {placements}, expected Replicate or Shard of a dimension but the last, "
                f"{last}, on every axis of {hidden.device_mesh}: redistribute it first"
            )
        # the ranks' slices would not follow each other
        if index > axis and _shards(placement) and placement == placements[axis]:
            raise ValueError(
                f"hidden has the placements {placements}, expected no axis after that of the vocabulary, {axis}, to "
                "shard the same dimension"
            )
    return tuple(placements)


def _agreeing(shard: VocabShard, implied: VocabShard) -> VocabShard:
    if not isinstance(shard, VocabShard):
        raise TypeError(f"shard must be a VocabShard, got {type(shard).__name__}")
    if list(_values(shard)) != list(_values(implied)):
        raise ValueError(f"shard is {shard}, but weight's placements say {implied}: pass weight alone")
    return implied


def _values(shard: VocabShard) -> Iterator[object]:
    yield from (shard.start, shard.stop, shard.vocab_size, shard.sequence_parallel)
    yield [dist.get_rank()] if shard.group is None else dist.get_process_group_ranks(shard.group)


def _shard_on(mesh: DeviceMesh, axis: int, vocab_size: int, sequence_parallel: bool = False) -> VocabShard:
    if mesh.get_coordinate() is None:
        raise ValueError(f"weight is on {mesh}, of which this process is no member")
    return _cached_shard(mesh.get_group(axis), mesh.get_local_rank(axis), vocab_size, sequence_parallel)


# kept for good: what the group's ranks have agreed on must be remembered by all of them or by none
@functools.cache
def _cached_shard(group: dist.ProcessGroup, rank: int, vocab_size: int, sequence_parallel: bool) -> VocabShard:
    if sequence_parallel:
        return replace(_cached_shard(group, rank, vocab_size, False), sequence_parallel=True)
    chunk = -(-vocab_size // group.size())
    # by the place in the mesh, which may number the group's ranks in another order
    return VocabShard(min(rank * chunk, vocab_size), min((rank + 1) * chunk, vocab_size), vocab_size, group)
