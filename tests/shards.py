"""Layouts of a vocabulary over a group, and whole tensors of what its ranks hold."""

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
    parts = [None] * shard.group.size()
    dist.all_gather_object(parts, local.detach()[: shard.classes].cpu(), group=shard.group)
    return torch.cat(parts).to(local.device)
