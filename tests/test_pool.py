"""The ranks that the other tests trust: what fails on them fails here, and the next check runs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import RankError, SpawnedRanks


def check_rank_fails(group, device):
    assert dist.get_rank(group) != 1, "on purpose"


def check_rank_dies(group, device):
    if dist.get_rank(group) == 1:
        os._exit(7)


def check_rank_hangs(group, device):
    if dist.get_rank(group) == 0:
        dist.barrier(group)
    else:
        time.sleep(3600)


def check_size(group, device, size):
    assert group.size() == size
    total = torch.ones((), device=device)
    dist.all_reduce(total, group=group)
    assert total == size


def check_poison(group, device):
    assert torch.empty(3).isnan().all()
    assert torch.ones(2).new_empty(2).isnan().all()
    assert torch.empty_like(torch.ones(2, dtype=torch.int64))[0] == torch.iinfo(torch.int64).max


@pytest.mark.skipif("RANK" in os.environ, reason="spawns ranks of its own")
def test_failures_are_raised_and_the_ranks_come_back() -> None:
    ranks = SpawnedRanks(size=2)
    try:
        with pytest.raises(RankError, match=r"rank 1:\n.*Traceback(.|\n)*on purpose"):
            ranks.run(check_rank_fails, ranks=2)
        with pytest.raises(RankError, match="rank 1:\nthe process died with exit code 7"):
            ranks.run(check_rank_dies, ranks=2)
        with pytest.raises(RankError, match="no answer"):
            ranks.run(check_rank_hangs, ranks=2, timeout=8)
        ranks.run(check_size, 2, ranks=2)
    finally:
        ranks.close()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_groups_have_the_size_asked_for(ranks, size) -> None:
    ranks.run(check_size, size, ranks=size)


def test_memory_is_poisoned_on_ranks_and_here(ranks) -> None:
    check_poison(None, None)
    ranks.run(check_poison, ranks=2)
    ranks.run(check_poison, ranks=1, interpret=True)
