"""Slices of the hidden states: sequence parallelism. The checks run on spawned ranks, or on those of a torchrun job:
``torchrun --nproc-per-node 2 -m pytest tests/test_sequence.py``."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from inputs import IGNORED, Inputs, make_inputs, make_trained_inputs
from plans import forced_plan
from shards import gathered
from tolerance import assert_gradients, assert_loss

from cce_dist import VocabShard, linear_cross_entropy

# (shape of the targets, dimension of the slices, their lengths for a group of some size)
SLICES = {
    # as many as the roundings to 16 bits average out over
    "rows": ((360,), 0, lambda size: [360 // size] * size),
    "uneven": (
        (41,),
        0,
        lambda size: [3 + 5 * r for r in range(size - 1)] + [41 - sum(3 + 5 * r for r in range(size - 1))],
    ),
    "empty first": ((23,), 0, lambda size: [0] * (size - 1) + [23]),
    "batch first": ((3, 14), 1, lambda size: [14 - (size - 1) * (14 // size)] + [14 // size] * (size - 1)),
    "sequence first": ((13, 3), 0, lambda size: [13 - (size - 1) * (13 // size)] + [13 // size] * (size - 1)),
}
METHODS = {
    "recompute": ("recompute", {"panel": 256, "wide": 0}),
    "recompute blocks": ("recompute", {"panel": 256, "wide": 0, "rows": 16}),
    "cached some": ("cached", {"kept": 256, "panel": 256, "wide": 0}),
    "cached all": ("cached", {"kept": 1 << 20}),
    "cached lent": ("cached", {"kept": 512, "lent": 256, "slab": 256, "part": 32, "panel": 256, "wide": 0}),
    "fused whole": ("fused", {"chunk": 1 << 20}),
    "fused chunks": ("fused", {"chunk": 16}),
}  # fmt: skip


def slice_of(whole: torch.Tensor, dim: int, lengths: list[int], group) -> torch.Tensor:
    return whole.detach().split(lengths, dim)[dist.get_rank(group)].clone().requires_grad_()


def rows_of(weight: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    return weight.detach()[shard.start : shard.start + shard.classes].clone().requires_grad_()


def check_slices(group, device, slices, dtype, method, fields, reduction):
    shape, dim, lengths = SLICES[slices]
    # a share of the gradient that has memory to lend
    lengths, n, d, v = lengths(group.size()), math.prod(shape), 64, 1401 if "lent" in fields else 701
    make = make_trained_inputs if dtype == torch.bfloat16 else make_inputs
    flat = make(n, d, v, dtype, device=device, ignored=0.2, bias=True)
    inputs = Inputs(
        flat.hidden.detach().view(*shape, d).requires_grad_(), flat.weight, flat.targets.view(shape), flat.bias
    )
    with torch.no_grad():
        inputs.hidden[inputs.targets == IGNORED] = math.nan
    shard = VocabShard.even(v, group, sequence_parallel=True)
    hidden, weight = slice_of(inputs.hidden, dim, lengths, group), rows_of(inputs.weight, shard)
    bias = rows_of(inputs.bias, shard)
    whole = linear_cross_entropy(
        inputs.hidden, weight, inputs.targets, bias=bias, shard=VocabShard.even(v, group), reduction=reduction
    )
    upstream = torch.rand(whole.shape, generator=torch.Generator().manual_seed(1)).to(device) + 0.5
    with forced_plan(**fields):
        loss = linear_cross_entropy(
            hidden, weight, inputs.targets, bias=bias, shard=shard, method=method, reduction=reduction
        )
        assert torch.equal(loss.detach(), whole.detach()), "the loss depends on who holds the hidden states"
        for _ in range(2):
            # the second one takes the slices anew
            hidden.grad = weight.grad = bias.grad = None
            loss.backward(upstream, retain_graph=True)
            assert hidden.grad.shape == hidden.shape
            gradients = (
                gathered(hidden.grad, dim, group),
                gathered(weight.grad, 0, group),
                gathered(bias.grad, 0, group),
            )
            yardstick = "output" if dtype == torch.bfloat16 else "operands"
            assert_gradients(gradients, inputs, upstream, yardstick=yardstick, reduction=reduction)
    assert_loss(loss.detach(), inputs, reduction=reduction)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("method", ["recompute", "cached some", "fused chunks"])
def test_slices(ranks, slices, method, size) -> None:
    ranks.run(check_slices, slices, torch.float32, *METHODS[method], "mean", ranks=size)


@pytest.mark.parametrize("method", METHODS)
def test_every_plan(ranks, method) -> None:
    ranks.run(check_slices, "uneven", torch.float32, *METHODS[method], "sum", ranks=2)


@pytest.mark.parametrize("method", ["recompute", "cached some"])
@pytest.mark.parametrize("slices", ["uneven", "batch first"])
def test_losses_of_tokens(ranks, slices, method) -> None:
    ranks.run(check_slices, slices, torch.float32, *METHODS[method], "none", ranks=3)


@pytest.mark.parametrize("method", ["recompute blocks", "cached some", "fused chunks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtypes(ranks, dtype, method) -> None:
    ranks.run(check_slices, "rows", dtype, *METHODS[method], "mean", ranks=2)


def check_fp16(group, device):
    check_slices(group, device, "rows", torch.float16, *METHODS["recompute"], "mean")


def test_fp16(ranks) -> None:
    ranks.run(check_fp16, ranks=2)


def check_what_is_communicated_and_kept(group, device):
    """The hidden states are gathered twice and not kept, their gradient is scattered and never whole on a rank."""
    n, d, v = 64, 48, 600
    inputs = make_inputs(n, d, v, device=device)
    shard = VocabShard.even(v, group, sequence_parallel=True)
    hidden, weight = slice_of(inputs.hidden, 0, [n // 2] * 2, group), rows_of(inputs.weight, shard)
    sent: dict[str, list[int]] = {"all_gather_into_tensor": [], "reduce_scatter_tensor": [], "all_reduce": []}
    kept: list[int] = []

    def counting(name):
        call = getattr(dist, name)

        def counted(tensor, *args, **options):
            sent[name].append(tensor.numel())
            return call(tensor, *args, **options)

        return counted

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        for name in sent:
            patch.setattr(dist, name, counting(name))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = linear_cross_entropy(hidden, weight, inputs.targets, shard=shard, method="recompute")
        assert sent["all_gather_into_tensor"] == [n * d]
        loss.backward()
    assert sent["all_gather_into_tensor"] == [n * d] * 2
    assert sent["reduce_scatter_tensor"] == [n // 2 * d]
    # a maximum, a sum, a logit and a count of owners a token
    assert max(sent["all_reduce"]) == 3 * n
    assert sorted(kept)[-2:] == sorted([hidden.numel(), weight.numel()])


def test_what_is_communicated_and_kept(ranks) -> None:
    ranks.run(check_what_is_communicated_and_kept, ranks=2)


def check_wrong_slices(group, device):
    inputs = make_inputs(20, 8, 40, device=device)
    shard = VocabShard.even(40, group, sequence_parallel=True)
    weight, rank = rows_of(inputs.weight, shard), dist.get_rank(group)
    with pytest.raises(
        ValueError, match=r"hidden must be the ranks' slices of the shape \(20,\).* got \(10,\), \(9,\)"
    ):
        linear_cross_entropy(inputs.hidden[: 10 - rank], weight, inputs.targets, shard=shard)
    with pytest.raises(ValueError, match="targets must have the 2 dimensions of the slices of hidden"):
        linear_cross_entropy(inputs.hidden[None, :10], weight, inputs.targets, shard=shard)
    # ranks that differ in whether there are slices
    other = VocabShard.even(40, group, sequence_parallel=rank == 0)
    with pytest.raises(ValueError, match="must be the same on every rank"):
        linear_cross_entropy(inputs.hidden[: 20 if rank else 10], weight, inputs.targets, shard=other)


def test_wrong_slices(ranks) -> None:
    ranks.run(check_wrong_slices, ranks=2)


def test_one_rank_holds_the_whole_sequence() -> None:
    inputs = make_inputs(20, 8, 40)
    shard = VocabShard(0, 40, 40, sequence_parallel=True)
    loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, shard=shard)
    assert torch.equal(loss, linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets))
    assert_gradients([*torch.autograd.grad(loss, [inputs.hidden, inputs.weight]), None], inputs)


def check_no_tokens(group, device):
    inputs = make_inputs(0, 8, 40, device=device)
    shard = VocabShard.even(40, group, sequence_parallel=True)
    weight = rows_of(inputs.weight, shard)
    loss = linear_cross_entropy(inputs.hidden, weight, inputs.targets, shard=shard)
    loss.backward()
    assert loss == 0
    assert (weight.grad == 0).all()
    assert inputs.hidden.grad.shape == (0, 8)


def test_no_tokens(ranks) -> None:
    ranks.run(check_no_tokens, ranks=2)
