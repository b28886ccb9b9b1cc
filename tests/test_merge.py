"""Bounds of shards, and the merge of statistics: whole-number arithmetic in which no order shows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from cce_dist import VocabShard
from cce_dist.kernels.statistics import TileStatistics, sum_bits
from cce_dist.parallel import shard as shard_module
from cce_dist.parallel.merge import merge_statistics

_GROUP = object()


def shards(monkeypatch, make, size: int) -> list[VocabShard]:
    found = []
    for rank in range(size):
        monkeypatch.setattr(shard_module, "rank_and_size", lambda group, rank=rank: (rank, size))
        found.append(make())
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 64])
@pytest.mark.parametrize("v", [1, 2, 5, 255, 256, 257, 32000, 50257, 128256])
def test_constructors_tile(monkeypatch, v, size) -> None:
    makes = {
        "even": lambda: VocabShard.even(v, _GROUP),
        "blocks": lambda: VocabShard.even(v, _GROUP, multiple_of=256),
        "chunked": lambda: VocabShard.chunked(v, _GROUP),
        "padded": lambda: VocabShard.padded(v, 128, _GROUP),
    }
    for name, make in makes.items():
        found = shards(monkeypatch, make, size)
        assert found[0].start == 0
        assert all(a.stop == b.start for a, b in itertools.pairwise(found)), name
        assert sum(s.classes for s in found) == v, name
        assert all(0 <= s.classes <= s.rows for s in found), name
        rows = [s.rows for s in found]
        match name:
            case "even":
                assert max(rows) - min(rows) <= 1
                assert rows == sorted(rows, reverse=True)
            case "blocks":
                assert all(s.start % 256 == 0 or s.start == v for s in found)
            case "chunked":
                pieces = [len(piece) for piece in torch.arange(v).chunk(size)]
                assert rows == pieces + [0] * (size - len(pieces))
            case "padded":
                assert len(set(rows)) == 1
                assert rows[0] % 128 == 0
                assert sum(rows) - v < 128 * size
        if name != "padded":
            assert found[-1].stop == v, name


@pytest.mark.parametrize("v", [1, 2, 3, 256, 257, 128256, 2**24, 2**31])
def test_sums_leave_room(v) -> None:
    bits = sum_bits(v)
    assert v * 2**bits < 2**63
    # and are no coarser than they need be
    assert v * 2 ** (bits + 2) >= 2**63 or v == 1


def test_the_merge_does_not_depend_on_the_order() -> None:
    generator = torch.Generator().manual_seed(0)
    tile_max = torch.randn(40, 9, generator=generator) * 20
    tile_sum = torch.rand(40, 9, generator=generator) * 200 + 1
    z, targets = torch.randn(9, generator=generator), torch.arange(9)
    bits = sum_bits(10000)
    first = merge_statistics(TileStatistics(tile_max, tile_sum, targets, z, 0, 9), bits, None)
    for seed in range(5):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
        again = merge_statistics(TileStatistics(tile_max[order], tile_sum[order], targets, z, 0, 9), bits, None)
        assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))
    row_max, log_sum, loss, *_ = first
    truth = torch.logsumexp(tile_max.double() + tile_sum.double().log(), 0)
    assert torch.allclose(row_max.double() + log_sum.double(), truth, rtol=1e-6)
    assert torch.allclose(loss.double(), truth - z.double(), rtol=1e-6)


def test_the_merge_marks_what_has_no_answer() -> None:
    tile_max = torch.tensor([[0.0, math.nan, math.inf, -math.inf, 0.0]])
    tile_sum = torch.tensor([[1.0, 1.0, math.nan, 0.0, 1.0]])
    # the last row's target is no column
    targets = torch.tensor([0, 1, 2, 3, 9])
    z = torch.tensor([0.0, 0.0, 0.0, -math.inf, 0.0])
    row_max, _, loss, *_ = merge_statistics(TileStatistics(tile_max, tile_sum, targets, z, 0, 9), 40, None)
    assert loss[0] == 0
    assert loss[1:].isnan().all()
    assert row_max[1] == row_max[2] == math.inf
