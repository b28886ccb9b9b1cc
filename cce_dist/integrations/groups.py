"""DeepSpeed's process groups, and one's own for it."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from .heads import Head
from .sequence import SequenceParallel


def _groups() -> Any:
    """DeepSpeed's process groups, where it has been imported and has some."""
    groups = sys.modules.get("deepspeed.utils.groups")
    return groups if groups is not None and dist.is_available() and dist.is_initialized() else None


def taken_by_zero(head: Any) -> bool:
    """Whether an engine of ZeRO's stages 1 to 3 has taken the parameters of ``head``."""
    return any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for p in head.parameters())


def sequence_size() -> int:
    groups = _groups()
    if groups is None or groups.mpu is None or not hasattr(groups.mpu, "get_sequence_parallel_world_size"):
        return 1
    return int(groups.mpu.get_sequence_parallel_world_size())


def sequence_parallel(engine: Any) -> SequenceParallel | None:
    if sequence_size() == 1:
        return None
    averages = engine.zero_optimization_stage() >= 3
    if averages and not engine.zero_reduce_scatter():
        raise ValueError(
            '"reduce_scatter": false at stage 3 adds up some gradients over the sequence-parallel ranks and averages '
            "others: leave it true"
        )
    return SequenceParallel(_groups().mpu.get_sequence_parallel_group(), averages)


def check_groups(head: Head) -> None:
    """``ValueError`` where the ranks that average gradients, and whose weights were made equal, hold different rows.
    The same on every rank of the group."""
    groups = _groups()
    if head.shard is None or groups is None:
        return
    assert head.shard.group is not None
    data = groups._get_sequence_data_parallel_group()
    if data is None:
        return
    shared = set(dist.get_process_group_ranks(head.shard.group)) & set(dist.get_process_group_ranks(data))
    if len(shared) > 1:
        raise ValueError(
            f"the ranks {sorted(shared)} hold different rows of {head.name or 'the head'}, but DeepSpeed averages "
            "gradients over them, and has given them the first one's weights: build the model again and pass "
            "deepspeed.initialize(..., mpu=TensorParallelUnit(tp_size))"
        )


class TensorParallelUnit:
    """What ``deepspeed.initialize(mpu=...)`` needs to know of a tensor-parallel layout of one's own: ``size``
    neighbouring ranks share a model, ranks of the same place in them are replicas. Made on every rank, after
    ``torch.distributed`` is initialised.

    Raises ``ValueError`` for a ``size`` that does not divide the count of ranks.
    """

    def __init__(self, size: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        if size < 1 or world % size:
            raise ValueError(f"size must divide the {world} ranks, got {size}")
        for start in range(0, world, size):
            members = list(range(start, start + size))
            group = dist.new_group(members)
            if rank in members:
                self._tensor = group
        for place in range(size):
            members = list(range(place, world, size))
            group = dist.new_group(members)
            if rank in members:
                self._data = group

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tensor

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._tensor)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._tensor)

    # universal checkpoints ask by these names
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)
