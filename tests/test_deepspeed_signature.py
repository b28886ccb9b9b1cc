"""Ours under the name and the arguments of DeepSpeed's own vocabulary-parallel loss, beside it."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from deepspeed_jobs import clean_state, libraries
from inputs import IGNORED, make_inputs, make_trained_inputs, make_upstream
from pool import subgroup
from shards import assert_same_bits, gathered
from tolerance import assert_gradients, assert_loss

from cce_dist.integrations.deepspeed import vocab_parallel_linear_cross_entropy


def theirs():
    libraries().init_distributed()
    from deepspeed.sequence import linear_cross_entropy

    return linear_cross_entropy.vocab_parallel_linear_cross_entropy


def compute(function, inputs, upstream, **arguments):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (inputs[0], inputs[1], inputs.bias)]
    loss = function(leaves[0], leaves[1], inputs.targets, leaves[2], **arguments)
    loss.backward(upstream)
    return loss.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)


def check_same(device, reduction, vocab, bias, dtype):
    group = subgroup((0, 2), (1, 3)) if dist.get_world_size() == 4 else dist.group.WORLD
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole = make_trained_inputs(137, 64, vocab, dtype, device=device, bias=bias, ignored=0.3)
    whole = whole._replace(hidden=whole.hidden.detach().view(1, 137, 64), targets=whole.targets.view(1, 137))
    sizes = [vocab // size + (r < vocab % size) for r in range(size)]
    start = sum(sizes[:rank])
    rows = slice(start, start + sizes[rank])
    part = whole._replace(
        weight=whole.weight.detach()[rows], bias=None if bias is False else whole.bias.detach()[rows]
    )
    bounds = {"vocab_start_index": rows.start, "vocab_end_index": rows.stop} if vocab % size else {}
    upstream = make_upstream(torch.empty(1, 137)) if reduction == "none" else None
    with clean_state():
        function = theirs()
        assert [*inspect.signature(function).parameters] == [
            *inspect.signature(vocab_parallel_linear_cross_entropy).parameters
        ]
        arguments = {"tp_group": group, "reduction": reduction, "chunk_size": 7, **bounds}
        ours = compute(vocab_parallel_linear_cross_entropy, part, upstream, **arguments)
        other = compute(function, part, upstream, **arguments)
    assert_same_bits(ours[0], group)
    assert_loss(ours[0], whole, reduction=reduction)
    # theirs rounds its logits to 16 bits on CPUs
    if dtype == torch.float32:
        torch.testing.assert_close(other[0].view_as(ours[0]), ours[0], rtol=1e-5, atol=1e-5)
    gradients = [None if g is None else g if i == 0 else gathered(g, 0, group) for i, g in enumerate(ours[1:])]
    assert_gradients(gradients, whole, upstream, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("vocab", "bias", "dtype"), [(300, False, torch.float32), (301, True, torch.float32), (301, True, torch.bfloat16)]
)
def test_computes_what_deepspeeds_does(world, reduction, vocab, bias, dtype) -> None:
    world.run(check_same, reduction, vocab, bias, dtype)


def check_sequence(device):
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    whole = make_inputs(13 * size, 24, 101, device=device, ignored=0.4)
    # unequal counts of valid tokens, on the last rank none
    whole.targets[: 5 * size] = IGNORED
    whole.targets[-13:] = IGNORED
    tokens = slice(13 * rank, 13 * rank + 13)
    part = whole._replace(hidden=whole.hidden.detach()[tokens], targets=whole.targets[tokens])
    for reduction in ("mean", "sum"):
        with clean_state():
            function = theirs()
            found = compute(vocab_parallel_linear_cross_entropy, part, None, sp_group=group, reduction=reduction)
            other = compute(function, part, None, sp_group=group, reduction=reduction)
        assert_same_bits(found[0], group)
        assert_loss(found[0], whole, reduction=reduction)
        torch.testing.assert_close(other[0], found[0], rtol=1e-5, atol=0)
        # the ranks' gradients of the weight add up
        total = found[2].clone()
        dist.all_reduce(total)
        assert_gradients([gathered(found[1], 0, group), total, None], whole, reduction=reduction)
        torch.testing.assert_close(other[2], found[2], rtol=1e-4, atol=1e-6)


def test_sums_over_sequence_parallel_ranks(world) -> None:
    world.run(check_sequence)


def check_mixed(device):
    inputs = make_inputs(9, 8, 33, device=device)
    narrow = inputs._replace(hidden=inputs.hidden.detach().bfloat16())
    with clean_state():
        other = compute(theirs(), narrow, None)
    ours = compute(vocab_parallel_linear_cross_entropy, narrow, None)
    for mine, other_one in zip(ours, other, strict=True):
        assert mine is other_one is None or mine.dtype == other_one.dtype
    torch.testing.assert_close(ours[0], other[0], rtol=1e-5, atol=0)


def test_promotes_as_deepspeeds_does(world) -> None:
    world.run(check_mixed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_start_index": 0}, "vocab_start_index and vocab_end_index go together, got 0 and None"),
        ({"chunk_size": 0}, "chunk_size must be positive, got 0"),
        ({"vocab_start_index": 5, "vocab_end_index": 38}, "rows 5 to 38 of a weight of 33 rows need the tp_group"),
        ({"reduction": "max"}, "reduction"),
    ],
)
def test_bad_arguments(arguments, message) -> None:
    hidden, weight, targets, _ = make_inputs(9, 8, 33)
    with pytest.raises(ValueError, match=message):
        vocab_parallel_linear_cross_entropy(hidden, weight, targets, **arguments)


def check_gap(device):
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, weight, targets, _ = make_inputs(9, 8, 33, device=device)
    start = 34 * rank
    with pytest.raises(ValueError, match=f"must tile the vocabulary of {34 * size - 1} without gap or overlap"):
        vocab_parallel_linear_cross_entropy(
            hidden, weight, targets, tp_group=dist.group.WORLD, vocab_start_index=start, vocab_end_index=start + 33
        )


def test_rows_with_a_gap(world) -> None:
    world.run(check_gap)
