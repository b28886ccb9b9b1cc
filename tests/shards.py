"""Layouts of a vocabulary over a group, and what its ranks hold: whole tensors of it, whether it is the same."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cce_dist import VocabShard


def shard_of(layout: str, vocab_size: int, group: dist.ProcessGroup) -> VocabShard:
    return (
        VocabShard.padded(vocab_size, 16, group)
        if layout == "padded"
        else getattr(VocabShard, layout)(vocab_size, group)
    )


def whole_of(local: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """The ranks' rows together, without padding."""
    return gathered(local.detach()[: shard.classes], 0, shard.group)


def gathered(local: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The ranks' tensors one behind the other along ``dim``, on every rank."""
    parts = [None] * group.size()
    dist.all_gather_object(parts, local.cpu(), group=group)
    return torch.cat(parts, dim).to(local.device)


def assert_same_bits(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    parts = [None] * group.size()
    dist.all_gather_object(parts, tensor.detach().cpu(), group=group)
    assert all(torch.equal(part, parts[0]) for part in parts), "the ranks differ"
